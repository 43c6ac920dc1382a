// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <span>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/codec/codec.h>
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

}  // namespace

TextMeeting::TextMeeting(Core& core, const char* call, int number)
    : core_(core),
      call_(call),
      number_(number),
      base_(std::string(call) + "/" + std::to_string(number) + "/") {}

TextMeeting::TextMeeting(const ProcessGroup& group, const char* call)
    : TextMeeting(ready(group), call, Core::of(group).numbers.next(call)) {}

void TextMeeting::give(const std::string& text) {
  const CoreOptions& options = core_.options;
  Meeting wait(options.job->waits, options.name,
               std::string(call_) + " #" + std::to_string(number_), options.rank, kAllCall,
               absent_from(options, base_));
  const StoreCallBounds bounds([&] { wait.look(); });
  try {
    core_.bootstrap->set(base_ + std::to_string(options.rank), to_bytes(text));
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    throw error.within(std::string(call_) + " " + options.place());
  }
}

std::vector<std::string> TextMeeting::texts() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < core_.options.size; ++rank)
    keys.push_back(base_ + std::to_string(rank));
  return read(keys);
}

std::vector<std::string> TextMeeting::texts_by_first() {
  using Texts = std::vector<std::string>;
  const std::string key = base_ + "all";
  if (core_.options.rank == 0) {
    Texts all = texts();
    core_.bootstrap->set(key, weft::encode(all));
    return all;
  }
  const std::string told = read({key}).front();
  const auto refused = [&](const std::string& why) {
    return Error(Blame::Protocol, std::string(call_) + " " + core_.options.place() +
                                      ": rank 0 did not tell the texts of all ranks: " + why)
        .with_ranks({0});
  };
  Texts all;
  try {
    all = weft::decode<Texts>(std::as_bytes(std::span(told)));
  } catch (const Error& error) {
    throw refused(error.text());
  }
  if (all.size() != static_cast<std::size_t>(core_.options.size))
    throw refused("there are " + std::to_string(all.size()));
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
