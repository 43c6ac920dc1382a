// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/shard/meta_tensors.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::shard {

namespace {

// Above the keys of all devices, which functions that make tensors do not have yet. libtorch keeps
// it for libraries that do this, and registers nothing for it.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

bool is_tensor(const c10::IValue& value) {
  return (value.isTensor() && value.toTensor().defined()) || value.isTensorList() ||
         value.isOptionalTensorList();
}

void on_meta(const c10::OperatorHandle& called, c10::DispatchKeySet keys,
             torch::jit::Stack* stack) {
  const auto& arguments = called.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  std::optional<std::size_t> device;
  bool takes_tensor = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[first + i];
    takes_tensor |= is_tensor(value);
    if (arguments[i].name() == "device" && value.isNone()) device = first + i;
  }
  if (device && !takes_tensor) (*stack)[*device] = c10::Device(c10::kMeta);
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  called.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

void install_meta_factories() {
  static Mutex mutex;
  static torch::Library* library = nullptr;  // never unloaded
  MutexLock lock(mutex);
  if (library != nullptr) return;
  auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  try {
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&on_meta>());
  } catch (const c10::Error& error) {
    throw Error(Blame::Unsupported,
                "OnMeta needs libtorch's dispatch key " + std::string(c10::toString(kKey)) +
                    ", which another library of this process uses: " + tensor::text_of(error));
  }
  library = made.release();
}

bool is_making_on_meta() { return c10::impl::tls_is_dispatch_key_included(kKey); }

void set_making_on_meta(bool on) { c10::impl::tls_set_dispatch_key_included(kKey, on); }

void put_into(const at::Tensor& tensor, c10::Storage storage, at::ScalarType dtype) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  impl._change_backend_component_keys(storage.device());
  impl.set_storage_and_dtype(std::move(storage), c10::scalarTypeToTypeMeta(dtype));
}

std::size_t storage_bytes(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.storage().nbytes() / tensor.element_size() * c10::elementSize(dtype);
}

}  // namespace weft::shard
