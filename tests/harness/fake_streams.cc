// SPDX-License-Identifier: Apache-2.0
// The fake driver's streams and events: queues of operations, and the rules for which may run when.
#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

// Polls, because a word in memory or a delay changes without notice.
constexpr auto kPoll = std::chrono::microseconds(100);

// Marks the thread as one that must not call CUDA while it runs a host function or a kernel.
struct HostFunctionScope {
  HostFunctionScope() { inside_host_function = true; }
  ~HostFunctionScope() { inside_host_function = false; }
};

}  // namespace

FakeStream* FakeState::find(CUstream handle, CUresult& error) {
  FakeContext* const context = current(error);
  if (context == nullptr) return nullptr;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return legacy_streams.at(context);
  FakeStream* const stream = object_of(streams, handle);
  if (stream == nullptr || stream->destroyed) {
    error = refuse(CUDA_ERROR_INVALID_HANDLE, stream ? "a stream was used after it was destroyed"
                                                     : "an unknown stream was used");
    return nullptr;
  }
  if (stream->context != context) {
    error = refuse(CUDA_ERROR_INVALID_CONTEXT,
                   "a stream of cuda:" + std::to_string(stream->context->device) +
                       " was used while cuda:" + std::to_string(context->device) + " was current");
    return nullptr;
  }
  return stream;
}

FakeEvent* FakeState::find(CUevent handle, CUresult& error) {
  FakeEvent* const event = object_of(events, handle);
  error = CUDA_SUCCESS;
  if (event != nullptr && !event->destroyed) return event;
  error = refuse(CUDA_ERROR_INVALID_HANDLE,
                 event ? "an event was used after it was destroyed" : "an unknown event was used");
  return nullptr;
}

// --- running

CUresult FakeState::enqueue(CUstream handle, Operation operation) {
  CUresult error = CUDA_SUCCESS;
  FakeStream* const stream = find(handle, error);
  return stream == nullptr ? error : enqueue(*stream, std::move(operation));
}

CUresult FakeState::enqueue(FakeStream& stream, Operation operation) {
  if (const auto capture = stream.capture) {
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    ++capture->reaches[&stream][&stream];
    capture->nodes.push_back({FakeGraph::Kind::Work, &stream, std::move(operation), nullptr});
    return CUDA_SUCCESS;
  }
  const auto delay = delays[static_cast<std::size_t>(operation.function)];
  if (delay.count() > 0) operation.not_before = Clock::now() + delay;
  enqueued.push_back(operation.text);
  stream.queue.push_back(std::move(operation));
  ++stream.enqueued;
  if (options.threads && !stream.worker.joinable())
    stream.worker = std::thread([this, &stream] { work(stream); });
  changed.notify_all();
  return CUDA_SUCCESS;
}

bool FakeState::ready(const FakeStream& stream) const {
  if (stream.running || stream.held || stream.queue.empty()) return false;
  const Operation& next = stream.queue.front();
  if (held[static_cast<std::size_t>(next.function)]) return false;
  if (next.not_before != Clock::time_point() && Clock::now() < next.not_before) return false;
  return !next.ready || next.ready();
}

bool FakeState::step(FakeStream& stream, std::unique_lock<std::mutex>& lock) {
  if (!ready(stream)) return false;
  const Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.running = true;
  lock.unlock();
  CUresult result = CUDA_SUCCESS;
  std::string thrown;
  try {
    const HostFunctionScope scope;
    if (operation.run) result = operation.run();
  } catch (const std::exception& error) {
    result = CUDA_ERROR_LAUNCH_FAILED;
    thrown = error.what();
  }
  lock.lock();
  stream.running = false;
  ++stream.finished;
  executed.emplace_back(&stream, operation.text);
  if (!thrown.empty()) complain(operation.text + " threw: " + thrown);
  if (result != CUDA_SUCCESS) lose(*stream.context, result);
  changed.notify_all();
  return true;
}

std::size_t FakeState::run_all(std::unique_lock<std::mutex>& lock) {
  std::size_t steps = 0;
  for (bool progress = true; progress;) {
    progress = false;
    // By index, because an operation may make a stream.
    for (std::size_t i = 0; i < streams.size(); ++i) {
      if (step(*streams[i], lock)) {
        ++steps;
        progress = true;
      }
    }
  }
  return steps;
}

void FakeState::work(FakeStream& stream) {
  std::unique_lock lock(mutex);
  while (!stopping) {
    if (step(stream, lock)) continue;
    if (stream.queue.empty()) {
      changed.wait(lock);
    } else {
      changed.wait_for(lock, kPoll);
    }
  }
}

bool FakeState::idle(const FakeContext& context) const {
  for (const auto& stream : streams) {
    if (stream->context == &context && !idle(*stream)) return false;
  }
  return true;
}

CUresult FakeState::block_until(const std::function<bool()>& done, const FakeContext& context,
                                Function function) {
  ++host_blocks;
  std::unique_lock lock(mutex, std::adopt_lock);
  const auto limit = Clock::now() + options.longest_block;
  while (!done() && context.lost == CUDA_SUCCESS && Clock::now() < limit) {
    // If the test steps the streams, a thread that blocks must step them itself.
    if (options.threads || run_all(lock) == 0) changed.wait_for(lock, kPoll);
  }
  lock.release();
  if (context.lost != CUDA_SUCCESS) return context.lost;
  if (done()) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_UNKNOWN,
                std::string(name(function)) + " waits for ever:" + describe_pending());
}

void FakeState::lose(FakeContext& context, CUresult result) {
  if (context.lost != CUDA_SUCCESS) return;
  context.lost = result;
  for (const auto& stream : streams) {
    if (stream->context != &context) continue;
    stream->finished += stream->queue.size();
    stream->queue.clear();
  }
  changed.notify_all();
}

std::string FakeState::describe_pending() const {
  std::string text;
  for (const auto& stream : streams) {
    if (idle(*stream)) continue;
    text += " stream " + std::to_string(stream->number) +
            " of cuda:" + std::to_string(stream->context->device) + " at " +
            (stream->queue.empty() ? "a running operation" : stream->queue.front().text) +
            (stream->held ? " (held)" : "") + ";";
  }
  return text;
}

void FakeState::complain_of_hung(const FakeContext* context) {
  for (const auto& stream : streams) {
    if ((context != nullptr && stream->context != context) || stream->queue.empty()) continue;
    const Operation& next = stream->queue.front();
    if (next.ready && !next.ready()) {
      complain("stream " + std::to_string(stream->number) + " of cuda:" +
               std::to_string(stream->context->device) + " hangs for ever at " + next.text);
    }
  }
}

// --- streams

CUresult FakeState::stream_create_with_priority(CUstream* stream, unsigned flags, int) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  if (flags != CU_STREAM_NON_BLOCKING) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED,
                  "the fake driver has no streams that synchronise with the legacy default stream");
  }
  auto& made = streams.emplace_back(std::make_unique<FakeStream>());
  made->context = context;
  made->number = static_cast<int>(streams.size());
  *stream = handle_of<CUstream>(made.get());
  return CUDA_SUCCESS;
}

CUresult FakeState::stream_destroy(CUstream handle) {
  CUresult error = CUDA_SUCCESS;
  FakeStream* const stream = find(handle, error);
  if (stream == nullptr) return error;
  if (stream == legacy_streams.at(stream->context)) {
    return refuse(CUDA_ERROR_INVALID_HANDLE, "the legacy default stream was destroyed");
  }
  stream->destroyed = true;  // its queue still runs
  return CUDA_SUCCESS;
}

CUresult FakeState::stream_query(CUstream handle) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const stream = find(handle, error);
  if (stream == nullptr) return error;
  return idle(*stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult FakeState::stream_synchronize(CUstream handle) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const stream = find(handle, error);
  if (stream == nullptr) return error;
  const auto target = stream->enqueued;
  return block_until([stream, target] { return stream->finished >= target; }, *stream->context,
                     Function::stream_synchronize);
}

CUresult FakeState::launch_host_func(CUstream stream, CUhostFn function, void* data) {
  return enqueue(stream,
                 {Function::launch_host_func, name(Function::launch_host_func), [function, data] {
                    function(data);
                    return CUDA_SUCCESS;
                  }});
}

// --- events

CUresult FakeState::event_create(CUevent* event, unsigned flags) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  auto& made = events.emplace_back(std::make_unique<FakeEvent>());
  made->context = context;
  made->interprocess = (flags & CU_EVENT_INTERPROCESS) != 0;
  made->timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *event = handle_of<CUevent>(made.get());
  return CUDA_SUCCESS;
}

CUresult FakeState::event_destroy(CUevent handle) {
  CUresult error = CUDA_SUCCESS;
  FakeEvent* const event = find(handle, error);
  if (event == nullptr) return error;
  event->destroyed = true;  // waiting streams hold the record
  return CUDA_SUCCESS;
}

CUresult FakeState::event_record(CUevent handle, CUstream stream_handle) {
  CUresult error = CUDA_SUCCESS;
  FakeStream* const stream = find(stream_handle, error);
  if (stream == nullptr) return error;
  FakeEvent* const event = find(handle, error);
  if (event == nullptr) return error;
  if (event->context != stream->context) {
    return refuse(CUDA_ERROR_INVALID_HANDLE,
                  "an event was recorded on a stream of another context");
  }
  event->last = std::make_shared<Record>();
  event->last->context = stream->context;
  if (stream->capture) {
    record_captured(*stream, *event);
    return stream->capture->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  }
  return enqueue(stream_handle,
                 {Function::event_record, name(Function::event_record), [record = event->last] {
                    record->passed = Clock::now();
                    record->done = true;
                    return CUDA_SUCCESS;
                  }});
}

CUresult FakeState::event_query(CUevent handle) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const FakeEvent* event = find(handle, error);
  if (event == nullptr) return error;
  if (event->context->lost != CUDA_SUCCESS) return event->context->lost;
  if (event->original != nullptr) event = event->original;
  if (event->last && event->last->capture) {
    return break_capture(*event->last->capture, CUDA_ERROR_CAPTURED_EVENT,
                         "an event was asked that was recorded in a capture");
  }
  return !event->last || event->last->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult FakeState::event_elapsed_time(float* milliseconds, CUevent from_handle,
                                       CUevent to_handle) {
  CUresult error = CUDA_SUCCESS;
  const FakeContext* const context = current(error);
  if (context == nullptr) return error;
  const FakeEvent* const from = find(from_handle, error);
  if (from == nullptr) return error;
  const FakeEvent* const to = find(to_handle, error);
  if (to == nullptr) return error;
  if (context->lost != CUDA_SUCCESS) return context->lost;
  if (!from->timed || !to->timed)
    return refuse(CUDA_ERROR_INVALID_HANDLE, "an event without timing was asked for its time");
  if (!from->last || !to->last)
    return refuse(CUDA_ERROR_INVALID_HANDLE, "an event was asked for its time before a record");
  if (!from->last->done || !to->last->done) return CUDA_ERROR_NOT_READY;
  *milliseconds =
      std::chrono::duration<float, std::milli>(to->last->passed - from->last->passed).count();
  return CUDA_SUCCESS;
}

CUresult FakeState::event_synchronize(CUevent handle) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const FakeEvent* const event = find(handle, error);
  if (event == nullptr) return error;
  if (event->last && event->last->capture) {
    return break_capture(*event->last->capture, CUDA_ERROR_CAPTURED_EVENT,
                         "the host waits for an event of a capture");
  }
  return block_until([record = event->last] { return !record || record->done; }, *event->context,
                     Function::event_synchronize);
}

CUresult FakeState::stream_wait_event(CUstream stream, CUevent handle, unsigned) {
  CUresult error = CUDA_SUCCESS;
  FakeStream* const found = find(stream, error);
  if (found == nullptr) return error;
  const FakeEvent* event = find(handle, error);
  if (event == nullptr) return error;
  if (event->original != nullptr) event = event->original;
  if (!event->last) return CUDA_SUCCESS;  // an event without a record is no work
  if (found->capture || event->last->capture) return wait_captured(*found, event->last);
  return enqueue(stream, {Function::stream_wait_event, name(Function::stream_wait_event), nullptr,
                          [record = event->last] {
                            return record->done || record->context->lost != CUDA_SUCCESS;
                          }});
}

}  // namespace weft::harness
