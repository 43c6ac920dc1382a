// SPDX-License-Identifier: Apache-2.0
// The fake driver's graphs: the work that streams enqueue between cuStreamBeginCapture and
// cuStreamEndCapture, and launches of it.
#include <algorithm>

#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

thread_local CUstreamCaptureMode mode_of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;

// The functions that the driver calls potentially unsafe: they act at once, and a launch would not
// repeat them.
bool is_unsafe(Function function) {
  switch (function) {
    case Function::event_query:
    case Function::event_synchronize:
    case Function::stream_query:
    case Function::stream_synchronize:
    case Function::ctx_synchronize:
    case Function::mem_alloc:
    case Function::mem_free:
    case Function::ipc_open_mem_handle:
    case Function::ipc_close_mem_handle:
    case Function::mem_host_alloc:
    case Function::mem_free_host:
    // The documentation says nothing about virtual memory, so all its functions count.
    case Function::mem_create:
    case Function::mem_release:
    case Function::mem_address_reserve:
    case Function::mem_address_free:
    case Function::mem_map:
    case Function::mem_unmap:
    case Function::mem_set_access:
    case Function::mem_retain_allocation_handle:
    case Function::mem_export_to_shareable_handle:
    case Function::mem_import_from_shareable_handle: return true;
    default: return false;
  }
}

void raise(Reach& to, const Reach& from) {
  for (const auto& [stream, count] : from) to[stream] = std::max(to[stream], count);
}

}  // namespace

CUresult FakeState::thread_exchange_stream_capture_mode(CUstreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return CUDA_SUCCESS;
}

CUresult FakeState::stream_is_capturing(CUstream handle, CUstreamCaptureStatus* status) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const stream = find(handle, error);
  if (stream == nullptr) return error;
  *status = !stream->capture               ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                           : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult FakeState::break_capture(FakeGraph& capture, CUresult result, const std::string& why) {
  if (!capture.ended) capture.invalidated = true;
  return refuse(result, why);
}

CUresult FakeState::check_captures(Function function) {
  if (!is_unsafe(function) || mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : captures) {
    const bool here = capture->thread == std::this_thread::get_id() &&
                      capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool elsewhere = mode_of_thread == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                           capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!here && !elsewhere) continue;
    result = break_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                           std::string(name(function)) + " was called while a stream is captured");
  }
  return result;
}

void FakeState::record_captured(FakeStream& stream, FakeEvent& event) {
  FakeGraph& capture = *stream.capture;
  event.last->capture = stream.capture;
  event.last->reach = capture.reaches[&stream];
  capture.nodes.push_back({FakeGraph::Kind::Record, &stream, {}, event.last});
}

CUresult FakeState::wait_captured(FakeStream& stream, const std::shared_ptr<Record>& record) {
  if (!record->capture) {
    return break_capture(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                         "a stream that is captured waits for an event that was recorded outside");
  }
  FakeGraph& capture = *record->capture;
  if (capture.ended)
    return refuse(CUDA_ERROR_CAPTURED_EVENT,
                  "a stream waits for an event of a capture that has ended");
  if (stream.capture && stream.capture != record->capture) {
    break_capture(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE,
                  "two captures wait for each other");
    capture.invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (capture.invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  stream.capture = record->capture;
  raise(capture.reaches[&stream], record->reach);
  capture.nodes.push_back({FakeGraph::Kind::Wait, &stream, {}, record});
  return CUDA_SUCCESS;
}

CUresult FakeState::begin_capture(FakeStream& stream, CUstreamCaptureMode mode) {
  if (stream.capture) return refuse(CUDA_ERROR_ILLEGAL_STATE, "a stream is captured twice");
  if (&stream == legacy_streams.at(stream.context)) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                  "the legacy default stream cannot be captured");
  }
  auto capture = std::make_shared<FakeGraph>();
  capture->origin = &stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->reaches[&stream];
  stream.capture = capture;
  captures.push_back(std::move(capture));
  return CUDA_SUCCESS;
}

CUresult FakeState::end_capture(FakeStream& stream, std::shared_ptr<FakeGraph>& graph) {
  const auto capture = stream.capture;
  if (!capture) return refuse(CUDA_ERROR_ILLEGAL_STATE, "a capture was ended that was not begun");
  if (capture->origin != &stream)
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "a capture was ended on another stream");
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
      capture->thread != std::this_thread::get_id()) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "a capture was ended by another thread");
  }
  std::erase(captures, capture);
  capture->ended = true;
  Reach& origin = capture->reaches[&stream];
  bool joined = true;
  for (auto& [member, reach] : capture->reaches) {
    member->capture = nullptr;
    joined = joined && origin[member] >= reach[member];
  }
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!joined) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                  "a capture ended before its first stream had waited for the others");
  }
  graph = capture;
  return CUDA_SUCCESS;
}

CUresult FakeState::launch(FakeGraph& graph, FakeStream& stream) {
  if (stream.capture)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "the fake driver captures no launches of graphs");
  std::map<const Record*, std::shared_ptr<Record>> fresh;
  CUresult result = CUDA_SUCCESS;
  for (const FakeGraph::Node& node : graph.nodes) {
    FakeStream* on = &stream;
    if (node.stream != graph.origin) {
      FakeStream*& branch = graph.branches[node.stream];
      if (branch == nullptr) {
        branch = streams.emplace_back(std::make_unique<FakeStream>()).get();
        branch->context = node.stream->context;
        branch->number = static_cast<int>(streams.size());
        branch->destroyed = true;  // no caller has its handle
      }
      on = branch;
    }
    Operation operation = node.operation;
    if (node.kind != FakeGraph::Kind::Work) {
      auto& record = fresh[node.record.get()];
      if (!record) {
        record = std::make_shared<Record>();
        record->context = node.record->context;
      }
      const auto passed = [record] {
        return record->done || record->context->lost != CUDA_SUCCESS;
      };
      const auto pass = [record] {
        record->passed = Clock::now();
        record->done = true;
        return CUDA_SUCCESS;
      };
      if (node.kind == FakeGraph::Kind::Record) {
        operation = {Function::event_record, name(Function::event_record), pass};
      } else {
        operation = {Function::stream_wait_event, name(Function::stream_wait_event), nullptr,
                     passed};
      }
    }
    if (result == CUDA_SUCCESS) result = enqueue(*on, std::move(operation));
  }
  return result;
}

}  // namespace weft::harness
