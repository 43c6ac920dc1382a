// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <deque>
#include <future>
#include <optional>
#include <utility>

#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/span_reads.h>

namespace weft::checkpoint {

namespace {

// Past the page cache, so many blocks of so many bytes are read at a time: the disk has the next
// request when it has answered one.
constexpr std::size_t kAtOnce = 3;
constexpr std::uint64_t kLargeBlock = std::uint64_t{8} << 20;
// Through the page cache, a block is compared with its checksum while the processor's caches have
// it. So many bytes are announced to the system before they are read, in ranges of so many.
constexpr std::uint64_t kSmallBlock = std::uint64_t{512} << 10;
constexpr std::uint64_t kAhead = std::uint64_t{32} << 20;
constexpr std::uint64_t kAnnounced = std::uint64_t{8} << 20;

// The part of a span that is in one block.
struct Part {
  const Span* span;
  std::uint64_t begin, end;  // in the file
  char* data;
  bool is_in_place;  // `data` is where the bytes are wanted
};

// Bytes of the file that are read by one call.
struct Block {
  std::uint64_t begin = 0;  // in the file
  std::vector<Part> parts;
  std::vector<iovec> memory;
  at::Tensor aside;  // for bytes that cannot be read to their place; may be undefined
};

// Cuts the spans into blocks, in order.
class Blocks {
 public:
  Blocks(const std::vector<Span>& spans, std::uint64_t alignment)
      : spans_(spans),
        alignment_(alignment),
        most_(alignment == 1 ? kSmallBlock : kLargeBlock),
        at_(spans.empty() ? 0 : spans.front().begin) {}

  bool has_next() const { return next_ < spans_.size(); }

  Block next() {
    Block block;
    block.begin = at_ / alignment_ * alignment_;
    const std::uint64_t limit = block.begin + most_;
    std::uint64_t end = at_;
    while (has_next() && at_ >= end && at_ - end < alignment_ && at_ < limit) {
      const Span& span = spans_[next_];
      end = std::min(span.end, limit);
      block.parts.push_back({&span, at_, end, nullptr, false});
      at_ = end;
      if (end == span.end && ++next_ < spans_.size()) at_ = spans_[next_].begin;
    }
    place(block, (end + alignment_ - 1) / alignment_ * alignment_);
    return block;
  }

  // Takes the memory of a block that has been used.
  void give_back(Block& block) {
    if (block.aside.defined()) unused_.push_back(std::move(block.aside));
  }

 private:
  bool can_be_in_place(const Part& part) const {
    const Span& span = *part.span;
    if (part.begin < span.first || part.end > span.last) return false;
    const auto place = reinterpret_cast<std::uintptr_t>(span.to + (part.begin - span.first));
    return part.begin % alignment_ == 0 && part.end % alignment_ == 0 && place % alignment_ == 0;
  }

  // Chooses the memory for the bytes up to `end`.
  void place(Block& block, std::uint64_t end) {
    std::uint64_t done = block.begin;
    const auto read_aside = [&](std::uint64_t until) {
      if (until == done) return;
      block.memory.push_back({aside(block) + (done - block.begin), until - done});
      done = until;
    };
    for (Part& part : block.parts) {
      part.is_in_place = can_be_in_place(part);
      if (!part.is_in_place) {
        part.data = aside(block) + (part.begin - block.begin);
        continue;
      }
      read_aside(part.begin);
      part.data = part.span->to + (part.begin - part.span->first);
      block.memory.push_back({part.data, part.end - part.begin});
      done = part.end;
    }
    read_aside(end);
  }

  char* aside(Block& block) {
    if (!block.aside.defined() && !unused_.empty()) {
      block.aside = std::move(unused_.back());
      unused_.pop_back();
    }
    if (!block.aside.defined()) block.aside = paged_bytes(most_);
    return static_cast<char*>(block.aside.mutable_data_ptr());
  }

  const std::vector<Span>& spans_;
  const std::uint64_t alignment_;
  const std::uint64_t most_;  // bytes of a block
  std::size_t next_ = 0;      // the span
  std::uint64_t at_;          // in the file
  std::vector<at::Tensor> unused_;
};

// Announces the spans' bytes some time before they are read.
class Announcer {
 public:
  Announcer(const ExistingFile& file, const std::vector<Span>& spans) : file_(file) {
    for (const Span& span : spans) {
      if (ranges_.empty() || span.begin > ranges_.back().second) {
        ranges_.emplace_back(span.begin, span.end);
      } else {
        ranges_.back().second = std::max(ranges_.back().second, span.end);
      }
    }
  }

  // `read`: the place in the file that is read next.
  void announce(std::uint64_t read) {
    while (next_ < ranges_.size() && std::max(at_, ranges_[next_].first) < read + kAhead) {
      const auto& [begin, end] = ranges_[next_];
      at_ = std::max(at_, begin);
      const std::uint64_t bytes = std::min(kAnnounced, end - at_);
      file_.prefetch(at_, bytes);
      at_ += bytes;
      if (at_ == end) ++next_;
    }
  }

 private:
  const ExistingFile& file_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_;
  std::size_t next_ = 0;
  std::uint64_t at_ = 0;
};

// Compares the blocks, which come in order, with the checksums.
class Comparison {
 public:
  Comparison(const ExistingFile& file, Algorithm algorithm) : file_(file), algorithm_(algorithm) {}

  void take(const Block& block) {
    for (const Part& part : block.parts) {
      compare(part);
      if (!part.is_in_place) copy(part);
    }
  }

 private:
  void compare(const Part& part) {
    const Span& span = *part.span;
    if (span.checksum == nullptr) return;
    if (part.begin == span.begin) checksum_.emplace(algorithm_);
    checksum_->add(part.data, part.end - part.begin);
    if (part.end != span.end || checksum_->text() == *span.checksum) return;
    file_.refuse("the checksum of '" + *span.name + "' differs in the file's bytes " +
                 std::to_string(span.begin) + " to " + std::to_string(span.end));
  }

  static void copy(const Part& part) {
    const Span& span = *part.span;
    const std::uint64_t from = std::max(part.begin, span.first);
    const std::uint64_t to = std::min(part.end, span.last);
    if (from < to)
      std::memcpy(span.to + (from - span.first), part.data + (from - part.begin), to - from);
  }

  const ExistingFile& file_;
  const Algorithm algorithm_;
  std::optional<Checksum> checksum_;
};

}  // namespace

void read_spans(const ExistingFile& file, const std::vector<Span>& spans, Algorithm algorithm) {
  const bool is_direct = file.alignment() > 1;
  Blocks blocks(spans, file.alignment());
  Announcer announcer(file, spans);
  Comparison comparison(file, algorithm);
  std::deque<std::pair<Block, std::future<void>>> ahead;
  while (!ahead.empty() || blocks.has_next()) {
    while (blocks.has_next() && ahead.size() < (is_direct ? kAtOnce : 1)) {
      auto& [block, done] = ahead.emplace_back(blocks.next(), std::future<void>());
      // get() reads itself if there is no thread for it, or the page cache is used.
      done = std::async(
          is_direct ? std::launch::async | std::launch::deferred : std::launch::deferred,
          [&file, memory = block.memory, begin = block.begin] { file.read(memory, begin); });
    }
    auto& [block, done] = ahead.front();
    if (!is_direct) announcer.announce(block.begin);
    done.get();
    comparison.take(block);
    blocks.give_back(block);
    ahead.pop_front();
  }
}

}  // namespace weft::checkpoint
