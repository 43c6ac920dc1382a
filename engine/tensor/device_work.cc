// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/engine/tensor/device_work.h>

namespace weft::detail {

namespace {

// Two works, each of which may be joined itself: for many futures, a tree.
class JoinedWork : public DeviceWork {
 public:
  JoinedWork(DeviceWorkRef one, DeviceWorkRef other)
      : one_(std::move(one)), other_(std::move(other)) {}

  void wait() const override {
    for (const DeviceWork* work : parts()) work->wait();
  }

  // If several parts are on one device, the stream of the innermost is current, so all parts wait
  // again inside.
  DeviceWorkRef run(const std::function<void()>& function) const override {
    return run_in(parts(), 0, function);
  }

 private:
  std::vector<const DeviceWork*> parts() const {
    std::vector<const DeviceWork*> parts;
    std::vector<const DeviceWork*> open{this};
    while (!open.empty()) {
      const DeviceWork* const next = open.back();
      open.pop_back();
      if (const auto* joined = dynamic_cast<const JoinedWork*>(next)) {
        open.push_back(joined->other_.get());
        open.push_back(joined->one_.get());
      } else {
        parts.push_back(next);
      }
    }
    return parts;
  }
  static DeviceWorkRef run_in(const std::vector<const DeviceWork*>& parts, std::size_t first,
                              const std::function<void()>& function) {
    if (first == parts.size()) {
      for (const DeviceWork* part : parts) part->wait();
      function();
      return nullptr;
    }
    DeviceWorkRef inner;
    const DeviceWorkRef outer =
        parts[first]->run([&] { inner = run_in(parts, first + 1, function); });
    return join(outer, inner);
  }

  DeviceWorkRef one_;
  DeviceWorkRef other_;
};

// Work that streams, one of each device, have enqueued until now.
class RecordedWork : public DeviceWork {
 public:
  explicit RecordedWork(const std::vector<c10::Stream>& streams) {
    for (const c10::Stream& stream : streams) {
      events_.emplace_back(stream.device(), c10::Event(stream.device_type()));
      events_.back().second.record(stream);
    }
  }

  void wait() const override {
    for (const auto& [device, event] : events_)
      event.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  DeviceWorkRef run(const std::function<void()>& function) const override {
    std::vector<c10::Stream> streams;
    for (const auto& [device, event] : events_) {
      streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
      event.block(streams.back());
    }
    const c10::MultiStreamGuard current(streams);
    function();
    return std::make_shared<RecordedWork>(streams);
  }

 private:
  std::vector<std::pair<c10::Device, c10::Event>> events_;
};

bool is_on_gpu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

void hand_over_one(const at::Tensor& tensor) {
  if (!is_on_gpu(tensor)) return;
  if (tensor.layout() == c10::kSparse) {
    hand_over_one(tensor._indices());
    hand_over_one(tensor._values());
  } else if (tensor.has_storage()) {
    const c10::impl::VirtualGuardImpl guard(tensor.device().type());
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
  }
}

}  // namespace

DeviceWorkRef join(DeviceWorkRef one, DeviceWorkRef other) {
  if (!one) return other;
  if (!other) return one;
  return std::make_shared<JoinedWork>(std::move(one), std::move(other));
}

DeviceWorkRef run_after(const DeviceWorkRef& work, const std::function<void()>& function) {
  if (work) return work->run(function);
  function();
  return nullptr;
}

DeviceWorkRef enqueued_for(const std::vector<const at::Tensor*>& tensors) {
  std::vector<c10::Stream> streams;
  for (const at::Tensor* tensor : tensors) {
    if (!is_on_gpu(*tensor)) continue;
    const c10::Device device = tensor->device();
    const auto known = [&](const c10::Stream& stream) { return stream.device() == device; };
    if (std::any_of(streams.begin(), streams.end(), known)) continue;
    streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  return streams.empty() ? nullptr : std::make_shared<RecordedWork>(streams);
}

void hand_over(const std::vector<const at::Tensor*>& tensors) {
  for (const at::Tensor* tensor : tensors) hand_over_one(*tensor);
}

}  // namespace weft::detail
