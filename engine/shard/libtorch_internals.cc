// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/tensor/private_members.h>
#include <weft/engine/tensor/shard_mark.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::shard {

namespace {

// Names of members that libtorch does not show.
struct KeySet;
struct ThrowsOnAccess;
struct Parameters;
struct Children;

}  // namespace

}  // namespace weft::shard

template struct weft::tensor::Reveal<weft::shard::KeySet, &c10::TensorImpl::key_set_>;
template struct weft::tensor::Reveal<weft::shard::ThrowsOnAccess,
                                     &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct weft::tensor::Reveal<weft::shard::Parameters, &torch::nn::Module::parameters_>;
template struct weft::tensor::Reveal<weft::shard::Children, &torch::nn::Module::children_>;

namespace weft::shard {

namespace {

// Above autograd and autocast, so that its fallback runs before anything else looks at the tensor.
// libtorch registers nothing for it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

UseHooks use_hooks;  // written once, by install()

// Owned by the data pointer of a shell's storage, with or without memory.
struct Context {
  Belongs belongs;
  at::Tensor memory;
};
void delete_context(void* context) { delete static_cast<Context*>(context); }
// Owned by the data pointer of a tensor that must not be used: the error's text.
void delete_refusal(void* text) { delete static_cast<std::string*>(text); }

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

Context* context_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_shell(tensor) || !tensor.has_storage()) return nullptr;
  const at::DataPtr& data = storage_of(tensor)._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &delete_context) return nullptr;
  return static_cast<Context*>(data.get_context());
}

void put(c10::StorageImpl& storage, void* data, Context context, c10::Device device) {
  storage.set_data_ptr_noswap(
      at::DataPtr(data, new Context(std::move(context)), &delete_context, device));
}

c10::Storage without_memory(Belongs belongs, std::size_t bytes, c10::Device device) {
  at::DataPtr nothing(nullptr, new Context{std::move(belongs), {}}, &delete_context, device);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes), std::move(nothing),
      nullptr, /*resizable=*/false));
}

void throw_if_refused(const at::Tensor& tensor) {
  if (!is_shell(tensor) || !tensor.has_storage()) return;
  const at::DataPtr& data = storage_of(tensor)._mutable_data_ptr_no_checks();
  if (data.get_deleter() == &delete_refusal)
    throw Error(Blame::Caller, *static_cast<const std::string*>(data.get_context()));
}

struct Used {
  std::vector<Belongs> belongings;
  std::vector<std::pair<at::Tensor, std::uint32_t>> versions;

  void add(const at::Tensor& tensor) {
    throw_if_refused(tensor);
    const Context* const context = context_of(tensor);
    if (context == nullptr) return;
    belongings.push_back(context->belongs);  // fill() replaces the context
    if (!tensor.is_inference())
      versions.emplace_back(tensor, static_cast<std::uint32_t>(tensor._version()));
  }
  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) add(item);
    }
  }
};

void before_operator(const c10::OperatorHandle& called, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  Used used;
  const std::size_t arguments = called.schema().arguments().size();
  for (const c10::IValue& value : torch::jit::last(*stack, arguments)) used.add(value);
  if (!used.belongings.empty()) use_hooks.before(used.belongings);
  {
    // The parts of this operator need not be looked at again.
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);
    called.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey),
                           stack);
  }
  for (const auto& [tensor, version] : used.versions) {
    if (static_cast<std::uint32_t>(tensor._version()) == version) continue;
    if (const Context* const context = context_of(tensor)) use_hooks.changed(context->belongs);
  }
}

// The detached aliases of a shard share it; copies do not have it.
struct OwnerMeta final : ShardMark {
  OwnerMeta(std::shared_ptr<Unit> unit, std::size_t parameter)
      : owner{std::move(unit), parameter} {}
  const Owner owner;
};

}  // namespace

void install(const UseHooks& hooks) {
  static Mutex mutex;
  static torch::Library* library = nullptr;  // never unloaded: tensors may outlive main()
  MutexLock lock(mutex);
  if (library != nullptr) return;
  use_hooks = hooks;
  auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  try {
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&before_operator>());
  } catch (const c10::Error& error) {
    throw Error(Blame::Unsupported,
                "sharding needs libtorch's dispatch key " + std::string(c10::toString(kKey)) +
                    ", which another library of this process uses: " + tensor::text_of(error));
  }
  library = made.release();
}

void become_shell(const at::Tensor& member, at::IntArrayRef sizes, at::IntArrayRef strides,
                  at::ScalarType dtype, Belongs belongs, const std::string& error) {
  std::int64_t elements = 1;
  for (const std::int64_t size : sizes) elements *= size;
  const std::size_t bytes = static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  const c10::Device device = member.device();
  const at::Tensor shell = [&] {
    const at::TensorOptions options = at::TensorOptions(dtype).device(device);
    c10::Storage storage = without_memory(std::move(belongs), bytes, device);
    if (!device.is_meta()) return at::empty({0}, options).set_(storage, 0, sizes, strides);
    // On meta, set_() takes storages only that can be resized.
    at::Tensor made = at::empty_strided(sizes, strides, options);
    made.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    return made;
  }();
  member.mutable_grad().reset();
  member.set_requires_grad(false);
  c10::TensorImpl& impl = *member.unsafeGetTensorImpl();
  // set_data() drops what others have marked the member with (convert_sync_batch_norm).
  const c10::DispatchKeySet marks = impl.key_set();
  auto mark = impl.get_backend_meta_intrusive_ptr();
  member.set_data(shell);
  auto& keys = impl.*tensor::revealed<KeySet>();
  keys = (keys | marks).add(kKey);
  if (mark) impl.set_backend_meta(std::move(mark));
  if (bytes > 0) set_access_error(member, error);  // otherwise there is no memory to miss
}

void set_access_error(const at::Tensor& shell, const std::string& error) {
  storage_of(shell).release_data_and_set_meta_custom_data_ptr_error_msg_(error);
}

void refuse_gradient(const at::Tensor& shell, const std::string& error) {
  const c10::AutoGradMode no_grad(false);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(shell.element_size()),
      at::DataPtr(nullptr, new std::string(error), &delete_refusal, c10::Device(c10::kCPU)),
      nullptr, /*resizable=*/false));
  const std::vector<std::int64_t> strides(static_cast<std::size_t>(shell.dim()), 0);
  const at::Tensor gradient =
      at::empty({0}, at::TensorOptions(shell.scalar_type()).device(at::kCPU))
          .set_(std::move(storage), 0, shell.sizes(), strides);
  auto& keys = gradient.unsafeGetTensorImpl()->*tensor::revealed<KeySet>();
  keys = keys.add(kKey);
  set_access_error(gradient, error);
  shell.mutable_grad() = gradient;
}

bool has_hooks(const at::Tensor& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->cpp_hooks_list_ &&
         std::ranges::any_of(*meta->cpp_hooks_list_,
                             [](const auto& hook) { return static_cast<bool>(hook); });
}

c10::Storage storage_without_memory(const at::Tensor& shell, std::size_t bytes,
                                    c10::Device device) {
  return without_memory(context_of(shell)->belongs, bytes, device);
}

WithoutHooks::WithoutHooks() : before_(c10::impl::tls_is_dispatch_key_excluded(kKey)) {
  c10::impl::tls_set_dispatch_key_excluded(kKey, true);
}
WithoutHooks::~WithoutHooks() { c10::impl::tls_set_dispatch_key_excluded(kKey, before_); }

bool is_shell(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kKey);
}

const Belongs* belonging(const at::Tensor& tensor) {
  const Context* const context = context_of(tensor);
  return context != nullptr ? &context->belongs : nullptr;
}

void fill(const at::Tensor& shell, const at::Tensor& memory, std::size_t offset) {
  c10::StorageImpl& storage = storage_of(shell);
  void* const data = static_cast<std::byte*>(memory.mutable_data_ptr()) + offset;
  Context context{context_of(shell)->belongs, memory};
  storage.*tensor::revealed<ThrowsOnAccess>() = false;
  put(storage, data, std::move(context), memory.device());
}

void release(const at::Tensor& shell) {
  c10::StorageImpl& storage = storage_of(shell);
  Context context{context_of(shell)->belongs, {}};
  storage.*tensor::revealed<ThrowsOnAccess>() = storage.nbytes() > 0;
  put(storage, nullptr, std::move(context), shell.device());
}

bool is_filled(const at::Tensor& shell) {
  const Context* const context = context_of(shell);
  return context != nullptr && context->memory.defined();
}

void set_owner(const at::Tensor& shard, std::shared_ptr<Unit> unit, std::size_t parameter) {
  shard.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<OwnerMeta>(std::move(unit), parameter));
}

Owner owner_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto* const meta =
      dynamic_cast<const OwnerMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return meta != nullptr ? meta->owner : Owner{};
}

struct WithoutChildren::Aside {
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> children;
};

WithoutChildren::WithoutChildren(torch::nn::Module& module)
    : module_(module), aside_(std::make_unique<Aside>()) {
  std::swap(module_.*tensor::revealed<Children>(), aside_->children);
}

WithoutChildren::~WithoutChildren() {
  std::swap(module_.*tensor::revealed<Children>(), aside_->children);
}

at::Tensor& parameter_entry(torch::nn::Module& module, const std::string& name) {
  at::Tensor* const entry = (module.*tensor::revealed<Parameters>()).find(name);
  if (entry == nullptr)
    throw Error(Blame::Caller, "the module has no parameter '" + name + "' any more");
  return *entry;
}

}  // namespace weft::shard
