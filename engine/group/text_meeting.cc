// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cstdint>
#include <string_view>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/store_meeting.h>
#include <weft/engine/group/text_meeting.h>
#include <weft/engine/store/backoff.h>

namespace weft::group {

namespace {

constexpr auto kMoment = std::chrono::seconds(2);

Core& ready(const ProcessGroup& group) {
  Core& core = Core::of(group);
  core.operations.throw_if_refused();
  return core;
}

// The texts with their sizes in front: "3:abc0:".
std::string encode_texts(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += std::to_string(text.size()) + ":" + text;
  return all;
}

// Ends at the first place that encode_texts() does not write.
std::vector<std::string> decode_texts(std::string_view all) {
  std::vector<std::string> texts;
  while (!all.empty()) {
    std::size_t size = 0;
    const auto number = std::from_chars(all.data(), all.data() + all.size(), size);
    const auto digits = static_cast<std::size_t>(number.ptr - all.data());
    if (number.ec != std::errc() || digits == all.size() || *number.ptr != ':') break;
    all.remove_prefix(digits + 1);
    if (size > all.size()) break;
    texts.emplace_back(all.substr(0, size));
    all.remove_prefix(size);
  }
  return texts;
}

}  // namespace

TextMeeting::TextMeeting(Core& core, const char* call, int number)
    : core_(core),
      call_(call),
      number_(number),
      base_(std::string(call) + "/" + std::to_string(number) + "/") {}

TextMeeting::TextMeeting(const ProcessGroup& group, const char* call)
    : TextMeeting(ready(group), call, Core::of(group).numbers.next(call)) {}

void TextMeeting::give(const std::string& text) {
  core_.bootstrap->set(base_ + std::to_string(core_.options.rank), to_bytes(text));
}

std::vector<std::string> TextMeeting::texts() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < core_.options.size; ++rank)
    keys.push_back(base_ + std::to_string(rank));
  return read(keys);
}

std::vector<std::string> TextMeeting::texts_by_first() {
  const std::string key = base_ + "all";
  const auto size = static_cast<std::size_t>(core_.options.size);
  if (core_.options.rank == 0) {
    std::vector<std::string> all = texts();
    core_.bootstrap->set(key, to_bytes(encode_texts(all)));
    return all;
  }
  std::vector<std::string> all = decode_texts(read({key}).front());
  if (all.size() != size) {
    throw Error(Blame::Protocol, std::string(call_) + " " + core_.options.place() +
                                     ": rank 0 has told the texts of " +
                                     std::to_string(all.size()) + " ranks, not of " +
                                     std::to_string(size))
        .with_ranks({0});
  }
  return all;
}

std::vector<std::string> TextMeeting::read(const std::vector<std::string>& keys) {
  const CoreOptions& options = core_.options;
  const Deadline deadline = Deadline::in(options.timeout);
  StoreMeeting meeting(options, *core_.bootstrap, *core_.ledger, core_.failure, base_,
                       std::string(call_) + " #" + std::to_string(number_));
  std::vector<std::string> texts;
  try {
    for (const auto& text : meeting.store().get_all(keys, deadline)) texts.push_back(to_text(text));
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    const std::string begin = std::string(call_) + " " + options.place() + ": ";
    const std::string limit = " within " + describe(options.timeout);
    const std::vector<int> absent = absent_from(options, base_)();
    if (absent.empty()) {
      throw Error(Blame::Timeout, begin + "all ranks have called it, but not" + limit +
                                      "; a longer timeout of the group gives them time");
    }
    throw Error(Blame::Timeout,
                begin + "rank " + std::to_string(absent.front()) + " did not call it" + limit)
        .with_ranks({absent.front()});
  }
  return texts;
}

std::vector<std::string> TextMeeting::meet() {
  return recorded(core_.member, call_, static_cast<std::uint64_t>(number_), core_.options.place(),
                  [this] {
                    std::vector<std::string> all;
                    core_.failure.by_the_store([&] { all = texts(); });
                    return all;
                  });
}

void TextMeeting::await_readers() noexcept {
  try {
    const std::string key = base_ + "read";
    const Deadline deadline = Deadline::in(kMoment);
    long readers = core_.bootstrap->add(key, 1);
    for (Backoff pause; readers < core_.options.size && !deadline.passed(); pause.wait(deadline))
      readers = core_.bootstrap->add(key, 0);
  } catch (const std::exception& error) {
    log::debug("the other ranks may have ended: " + std::string(error.what()));
  }
}

}  // namespace weft::group
