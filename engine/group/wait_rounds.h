// SPDX-License-Identifier: Apache-2.0
// Asks the other ranks of a group how far they have come, over the membership's connections, and
// collects their answers: one round for each question.
//
// Owned by Waits. ask() is for any thread and blocks; everything else runs on the job's loop and
// does not block.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <weft/base/event_loop.h>
#include <weft/engine/group/wait.h>
#include <weft/engine/group/wait_sources.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

class Membership;

class WaitRounds : public std::enable_shared_from_this<WaitRounds> {
 public:
  static constexpr auto kLimit = std::chrono::seconds(1);  // for ranks to answer

  WaitRounds(const std::shared_ptr<Membership>& membership, const std::shared_ptr<EventLoop>& loop,
             std::shared_ptr<const WaitSources> sources)
      : membership_(membership), loop_(loop), sources_(std::move(sources)) {}

  // From now on the other ranks can be asked.
  void on_connected() { connected_ = true; }
  // Null if the other ranks cannot be asked.
  std::shared_ptr<Membership> connected_membership() const;
  // Asks the members of a group. Blocks until all have answered: for kLimit, and twice as long if
  // the loop is held up. On the loop it asks nobody.
  WaitAnswers ask(const std::string& group);
  // Calls `done` when all have answered, or after kLimit.
  void begin(const std::string& group, std::function<void(const WaitAnswers&)> done);
  void on_answered(const Frame& frame);

 private:
  struct Round;
  void end(std::uint64_t number);

  const std::weak_ptr<Membership> membership_;
  const std::weak_ptr<EventLoop> loop_;
  const std::shared_ptr<const WaitSources> sources_;
  std::atomic<bool> connected_{false};
  // Used on the loop only.
  std::map<std::uint64_t, std::shared_ptr<Round>> rounds_;
  std::uint64_t last_round_ = 0;
};

// A rank's answer: the number of the round, whether it waits itself, and its progress. A peer's
// bytes are not trusted.
struct WaitAnswer {
  std::uint64_t round = 0;
  bool waits = false;
  Progress progress;
};
std::string encode(const WaitAnswer& answer);
std::optional<WaitAnswer> decode_wait_answer(std::string_view text);

}  // namespace weft::group
