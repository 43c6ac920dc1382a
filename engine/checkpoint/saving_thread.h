// SPDX-License-Identifier: Apache-2.0
// The thread of a save. Both forms of save_async() start it: that of a group (saving.cc) and that
// of a job (job_checkpoint.cc). Internal.
#pragma once

#include <functional>
#include <future>
#include <optional>
#include <string>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/checkpoint.h>

namespace weft::checkpoint {

// Ready when a save has ended; its error, if it has one.
using Ended = std::shared_future<std::optional<Error>>;

// Blocks until the earlier saves of this process over the group have ended.
void wait_for_saves(const ProcessGroup& group);

// Runs `work` on a thread of that label, and puts its result into the promise, whose future is
// `ended`. What `work` holds is destroyed before. Throws Busy if no thread can be started.
Saving start_saving(std::promise<std::optional<Error>> promise, Ended ended, std::string label,
                    std::function<std::optional<Error>()> work);

}  // namespace weft::checkpoint
