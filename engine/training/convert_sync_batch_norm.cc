// SPDX-License-Identifier: Apache-2.0
// forward() of a torch::nn module is not virtual, and a member of type torch::nn::BatchNorm2d
// cannot hold another layer, so the layer stays as it is. One of its tensors carries a dispatch key
// of its own, and the function registered for aten::batch_norm under that key is called in its
// place. All other operators pass the key by.
//
// The key is TESTING_ONLY_GenericMode. A key that tensors may carry, above those of autograd and
// autocast, for which libtorch registers nothing: of the keys of libtorch 2.9 to 2.15 that leaves
// this one, TESTING_ONLY_GenericWrapper (sharded parameters) and DeferredInit (construction without
// memory). Keys of devices and layouts lie below autograd, which would see the parts of batch_norm;
// those of autocast are switched off outside of autocast; those of vmap, functorch, Python, the
// tracer and nested tensors have fallbacks of libtorch's own.
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/training/sync_batch_norm.h>

namespace weft {

namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// What a marked tensor knows. libtorch's copies of a TensorImpl share it.
struct Mark : c10::BackendMeta {
  Mark(ProcessGroup of, std::weak_ptr<torch::nn::Module> in)
      : group(std::move(of)), layer(std::move(in)) {}
  const ProcessGroup group;
  const std::weak_ptr<torch::nn::Module> layer;  // a graph may outlive it
};

const Mark* mark_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(kKey)) return nullptr;
  return dynamic_cast<const Mark*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// Gives the tensor the key. TensorImpl has no function for this, but takes over the keys of another
// TensorImpl, which can be made with any. Values, version and gradient stay.
void mark(const at::Tensor& tensor, c10::intrusive_ptr<c10::BackendMeta> what) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  auto with_key = c10::make_intrusive<c10::TensorImpl>(c10::Storage(impl->storage()),
                                                       impl->key_set().add(kKey), impl->dtype());
  with_key->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  with_key->set_backend_meta(std::move(what));
  impl->shallow_copy_from(with_key);
}

at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool trains, double momentum,
                      double eps, bool cudnn_enabled) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const Mark* found = running_mean ? mark_of(*running_mean) : nullptr;
  if (found == nullptr && weight) found = mark_of(*weight);
  // Without running statistics libtorch's layer normalises by the batch in eval() mode as well.
  const auto layer = found == nullptr ? nullptr : found->layer.lock();
  if (!trains || found == nullptr || (layer && !layer->is_training())) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, trains, momentum, eps,
                          cudnn_enabled);
  }
  training::BatchNormCall call{weight.value_or(at::Tensor()), bias.value_or(at::Tensor()),
                               running_mean.value_or(at::Tensor()),
                               running_var.value_or(at::Tensor())};
  call.trains = true;
  call.momentum = momentum;
  call.eps = eps;
  return training::synchronized_batch_norm(input, call, found->group);
}

// Module::to() gives a layer the copies that this makes, so they are marked as well.
at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout> layout, std::optional<at::Device> device,
                   std::optional<bool> pin_memory, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  at::Tensor copy =
      at::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, memory_format);
  if (mark_of(self) != nullptr && copy.layout() == at::kStrided)
    mark(copy, self.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
  return copy;
}

// What the process has registered under the key, from the first conversion on.
struct Registered {
  torch::Library all{torch::Library::IMPL, "_", kKey, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__};
};

void register_once() {
  static Mutex mutex;
  static Registered* registered = nullptr;  // never ends: marked tensors may outlive main
  const MutexLock lock(mutex);
  if (registered != nullptr) return;
  auto fresh = std::make_unique<Registered>();
  try {
    fresh->all.fallback(torch::CppFunction::makeFallthrough());
    fresh->aten.impl("batch_norm", &batch_norm);
    fresh->aten.impl("_to_copy", &to_copy);
  } catch (const c10::Error& error) {
    throw Error(Blame::Unsupported,
                std::string("convert_sync_batch_norm: another library of this process uses "
                            "libtorch's dispatch key ") +
                    c10::toString(kKey) + "; use weft::SyncBatchNorm2d (1d, 3d) as the layers: " +
                    error.what_without_backtrace());
  }
  registered = fresh.release();
}

template <class Layer>
bool convert(Layer& layer, const std::string& name, const ProcessGroup& group) {
  const at::Tensor& carrier = layer.running_mean.defined() ? layer.running_mean : layer.weight;
  if (!carrier.defined()) {
    throw Error(Blame::Caller,
                "convert_sync_batch_norm: the layer '" + name +
                    "' has neither running statistics nor a weight, so it has no tensor that can "
                    "carry the group; use weft::SyncBatchNorm2d (1d, 3d) in its place");
  }
  mark(carrier, c10::make_intrusive<Mark>(group, layer.weak_from_this()));
  return true;
}

bool convert(torch::nn::Module& module, const std::string& name, const ProcessGroup& group) {
  if (auto* const one = module.as<torch::nn::BatchNorm1dImpl>()) return convert(*one, name, group);
  if (auto* const two = module.as<torch::nn::BatchNorm2dImpl>()) return convert(*two, name, group);
  if (auto* const three = module.as<torch::nn::BatchNorm3dImpl>())
    return convert(*three, name, group);
  return false;
}

}  // namespace

int convert_sync_batch_norm(torch::nn::Module& module, const ProcessGroup& group) {
  training::check_batch_norm_group(group);
  register_once();
  int converted = convert(module, "", group) ? 1 : 0;
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    converted += convert(*item.value(), item.key(), group) ? 1 : 0;
  return converted;
}

}  // namespace weft
