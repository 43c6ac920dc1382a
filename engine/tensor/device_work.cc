// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/engine/tensor/device_work.h>

namespace weft::detail {

namespace {

void add_devices(const std::vector<c10::Device>& more, std::vector<c10::Device>& devices) {
  for (const c10::Device device : more) {
    if (std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  }
}

// Several works, none of which is joined itself: to destroy them takes no more stack than to
// destroy one.
class JoinedWork : public DeviceWork {
 public:
  explicit JoinedWork(std::vector<DeviceWorkRef> works) {
    for (DeviceWorkRef& work : works) {
      if (const auto* const joined = dynamic_cast<const JoinedWork*>(work.get())) {
        parts_.insert(parts_.end(), joined->parts_.begin(), joined->parts_.end());
      } else {
        parts_.push_back(std::move(work));
      }
    }
  }

  std::vector<c10::Device> devices() const override {
    std::vector<c10::Device> devices;
    for (const DeviceWorkRef& part : parts_) add_devices(part->devices(), devices);
    return devices;
  }

  void wait() const override {
    for (const DeviceWorkRef& part : parts_) part->wait();
  }

  // The streams of a few parts become current, and wait for all parts. So the result has no more
  // parts than there are devices, however long a chain of continuations is.
  DeviceWorkRef run(const std::function<void()>& function) const override {
    std::vector<const DeviceWork*> running;
    std::vector<c10::Device> devices;
    for (const DeviceWorkRef& part : parts_) {
      const std::size_t before = devices.size();
      add_devices(part->devices(), devices);
      if (devices.size() > before) running.push_back(part.get());
    }
    return run_in(running, 0, function);
  }

 private:
  DeviceWorkRef run_in(const std::vector<const DeviceWork*>& running, std::size_t first,
                       const std::function<void()>& function) const {
    if (first == running.size()) {
      wait();
      function();
      return nullptr;
    }
    DeviceWorkRef inner;
    DeviceWorkRef outer =
        running[first]->run([&] { inner = run_in(running, first + 1, function); });
    return join(std::move(outer), std::move(inner));
  }

  std::vector<DeviceWorkRef> parts_;
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

  std::vector<c10::Device> devices() const override {
    std::vector<c10::Device> devices;
    for (const auto& [device, event] : events_) devices.push_back(device);
    return devices;
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

DeviceWorkRef join(std::vector<DeviceWorkRef> works) {
  std::erase(works, nullptr);
  if (works.empty()) return nullptr;
  if (works.size() == 1) return std::move(works.front());
  return std::make_shared<JoinedWork>(std::move(works));
}

DeviceWorkRef join(DeviceWorkRef one, DeviceWorkRef other) {
  std::vector<DeviceWorkRef> works;
  works.push_back(std::move(one));
  works.push_back(std::move(other));
  return join(std::move(works));
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
