// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/transport/tcp/striped_stream.h>

namespace weft::transport::tcp {

namespace {

// The most bytes that one call moves: a socket that is emptied as fast as it is filled would take
// any number.
constexpr std::size_t kAtOnce = 4 << 20;

}  // namespace

StripedStream::StripedStream(std::vector<std::unique_ptr<TcpStream>> sockets)
    : sockets_(
          std::make_shared<const std::vector<std::unique_ptr<TcpStream>>>(std::move(sockets))) {}

std::string StripedStream::peer() const { return sockets_->front()->peer(); }

// Passes on each socket's events. If it is not that socket's turn, the call finds nothing, and the
// bytes are found at its turn: a TcpStream remembers that it has not been read to its end.
void StripedStream::start(EventLoop& loop, std::function<void()> readable,
                          std::function<void()> writable) {
  const auto held = sockets_;  // a socket that cannot connect may destroy this stream meanwhile
  for (const auto& socket : *held) socket->start(loop, readable, writable);
}

void StripedStream::stop() noexcept {
  for (const auto& socket : *sockets_) socket->stop();
}

void StripedStream::advance(Turn& turn, std::size_t bytes) const {
  turn.left -= bytes;
  if (turn.left == 0) turn = {(turn.socket + 1) % sockets_->size(), kChunk};
}

std::size_t StripedStream::write(std::span<const Bytes> pieces) noexcept {
  std::size_t written = 0;
  std::size_t skip = 0;  // in the first piece
  while (!pieces.empty()) {
    if (written >= kAtOnce) {
      at(writing_).write_on();
      break;
    }
    parts_.clear();
    std::size_t offered = 0;
    while (!pieces.empty() && (offered < writing_.left || pieces.front().empty())) {
      parts_.push_back(pieces.front().subspan(
          skip, std::min(pieces.front().size() - skip, writing_.left - offered)));
      offered += parts_.back().size();
      skip += parts_.back().size();
      if (skip < pieces.front().size()) continue;
      pieces = pieces.subspan(1);
      skip = 0;
    }
    const std::size_t took = at(writing_).write(parts_);
    written += took;
    advance(writing_, took);
    if (took < offered) break;
  }
  return written;
}

// Other sockets may have bytes in the kernel whose events are queued behind the event of the loss.
bool StripedStream::looks_again() {
  if (lost_) return false;
  lost_ = write_end();
  if (!lost_) return false;
  for (const auto& socket : *sockets_) socket->read_through();
  return true;
}

StripedStream::Bytes StripedStream::peek(std::size_t wanted) noexcept {
  const std::size_t some = std::min(std::max<std::size_t>(wanted, 1), reading_.left);
  Bytes seen = at(reading_).peek(some);
  if (seen.size() < some && looks_again()) seen = at(reading_).peek(some);
  dry_ = seen.size() < some;
  if (seen.empty()) {
    for (const auto& socket : *sockets_) socket->rest();
  }
  return seen.first(std::min(seen.size(), reading_.left));
}

void StripedStream::consume(std::size_t bytes) noexcept {
  at(reading_).consume(bytes);
  advance(reading_, bytes);
}

std::size_t StripedStream::read(std::span<std::byte> to) noexcept {
  std::size_t moved = 0;
  while (moved < std::min(to.size(), kAtOnce)) {
    const std::size_t got =
        at(reading_).read(to.subspan(moved, std::min(to.size() - moved, reading_.left)));
    dry_ = got == 0;
    if (dry_ && looks_again()) continue;
    if (dry_) break;
    moved += got;
    advance(reading_, got);
  }
  return moved;
}

std::size_t StripedStream::window() const { return std::min(kChunk, sockets_->front()->window()); }

std::optional<Error> StripedStream::end() const noexcept {
  if (auto why = at(reading_).end()) return why;
  return dry_ ? lost_ : std::nullopt;
}

std::optional<Error> StripedStream::write_end() const noexcept {
  for (const auto& socket : *sockets_) {
    if (auto why = socket->cut()) return why;
  }
  return std::nullopt;
}

void StripedStream::finish_writing() noexcept {
  for (const auto& socket : *sockets_) socket->finish_writing();
}

std::unique_ptr<ByteStream> as_one(std::vector<std::unique_ptr<TcpStream>> sockets) {
  if (sockets.size() == 1) return std::move(sockets.front());
  return std::make_unique<StripedStream>(std::move(sockets));
}

}  // namespace weft::transport::tcp
