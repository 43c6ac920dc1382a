// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include <weft/engine/call/task_queue.h>

namespace weft::call {

void TaskQueue::add(Waiting waiting) {
  std::deque<Waiting>& tasks = waiting.is_beside ? beside_ : tasks_;
  tasks.push_back(std::move(waiting));
  tasks.back().has_waited = !has_room();
  depth_.add(1);
  note();
}

TaskQueue::Waiting TaskQueue::take() {
  std::deque<Waiting>& tasks = may_run_beside() ? beside_ : tasks_;
  Waiting taken = std::move(tasks.front());
  tasks.pop_front();
  depth_.add(-1);
  ++busy_;
  if (taken.is_beside) {
    ++blocked_;
    ++busy_beside_;
  }
  note();
  return taken;
}

void TaskQueue::finish(bool is_beside) {
  --busy_;
  if (is_beside) {
    --blocked_;
    --busy_beside_;
  }
  note();
}

void TaskQueue::block() {
  ++blocked_;
  note();
}

void TaskQueue::unblock() {
  --blocked_;
  note();
}

std::vector<TaskQueue::Waiting> TaskQueue::take_calls() {
  const auto calls = std::stable_partition(tasks_.begin(), tasks_.end(),
                                           [](const Waiting& waiting) { return !waiting.refuse; });
  std::vector<Waiting> taken(std::make_move_iterator(calls), std::make_move_iterator(tasks_.end()));
  tasks_.erase(calls, tasks_.end());
  depth_.add(-static_cast<std::int64_t>(taken.size()));
  note();
  return taken;
}

std::deque<TaskQueue::Waiting> TaskQueue::close() {
  closed_ = true;
  std::deque<Waiting> dropped;
  dropped.swap(tasks_);
  for (Waiting& waiting : beside_) dropped.push_back(std::move(waiting));
  beside_.clear();
  depth_.add(-static_cast<std::int64_t>(dropped.size()));
  note();
  return dropped;
}

}  // namespace weft::call
