// SPDX-License-Identifier: Apache-2.0
// What a Saving waits for: the thread that writes this process's part of a checkpoint. Internal.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/checkpoint/host_memory.h>

namespace weft::checkpoint {

using Ended = std::shared_future<std::optional<Error>>;

struct Saving::State {
  State() = default;
  ~State() {
    if (thread.joinable()) thread.join();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Runs `run` on a thread of that label, with `promise` for its result, whose future is `ended`.
  // Throws Busy if no thread can be started.
  void start(std::promise<std::optional<Error>> promise, std::function<std::optional<Error>()> run,
             std::string label);

  Ended ended;
  std::thread thread;
  const std::shared_ptr<KeptBytes> kept = KeptBytes::make();
  bool is_known = false;  // wait() has thrown the error
};

// What makes Saving objects.
struct SavingAccess {
  using State = Saving::State;
  static Saving begin(const std::string& folder, ProcessGroup& group,
                      const std::vector<Part>& parts, const SaveOptions& options);
  static std::shared_ptr<State>& state(Saving& saving) { return saving.state_; }
};

// Throws Caller if values of one part, which are named "PART.VALUE", could be named like those of
// another.
void refuse_ambiguous(const std::vector<std::string>& names);
// Throws Caller for options that make no sense.
void check_options(const SaveOptions& options);

}  // namespace weft::checkpoint
