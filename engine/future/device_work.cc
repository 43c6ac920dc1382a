#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/engine/future/device_work.h>

namespace weft::detail {

namespace {

class JoinedWork : public DeviceWork {
 public:
  JoinedWork(DeviceWorkRef one, DeviceWorkRef other) : one_(std::move(one)), other_(std::move(other)) {}

  void wait() const override {
    one_->wait();
    other_->wait();
  }

  // Where both are on one device the inner stream is the current one, so everything waits once more inside.
  DeviceWorkRef run(const std::function<void()>& function) const override {
    DeviceWorkRef inner;
    const DeviceWorkRef outer = one_->run([&] {
      inner = other_->run([&] {
        wait();
        function();
      });
    });
    return join(outer, inner);
  }

 private:
  DeviceWorkRef one_;
  DeviceWorkRef other_;
};

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

void hand_over(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu() || !tensor.has_storage()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

void hand_over(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) hand_over(tensor);
}

}  // namespace weft::detail
