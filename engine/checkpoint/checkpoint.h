// SPDX-License-Identifier: Apache-2.0
// Checkpoints: files from which a job continues after it has ended, for any reason.
//
//   const std::vector<weft::checkpoint::Part> parts = {
//       {"model", net}, {"optimizer", optimizer}, {"epoch", epoch}};
//   if (weft::checkpoint::exists("run", group)) weft::checkpoint::load("run", group, parts);
//   …
//   weft::checkpoint::Saving saving = weft::checkpoint::save_async("run", group, parts);
//   …                // training goes on while a thread writes
//   saving.wait();   // the checkpoint is on the disk
//
// There are two forms, and load() takes either; any number of ranks loads what any other has saved.
// - save_async() writes a folder in which all ranks write their share, while training goes on. The
//   ranks need a file system that they share. It holds safetensors files, which PyTorch and Python
//   read too.
// - save() writes one file from rank 0. The other ranks only name it, so no file system needs to be
//   shared. It is an archive of libtorch with an inner archive for each module and optimizer;
//   torch::serialize::InputArchive reads it.
//
// All calls except those of Saving are collective, block, and either return on all ranks or throw
// one error on all ranks. The time in which rank 0 reads and writes counts against the group's
// timeout. One thread at a time uses the parts.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace at {
struct Generator;
}  // namespace at
namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class LRScheduler;
class Optimizer;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace weft::checkpoint {

namespace detail {

using Scalar = std::variant<bool, std::int64_t, double, std::string>;

// A variable of the program: reads its value, checks that it can hold another one, and writes that.
struct Variable {
  void* place = nullptr;
  // Returns nullopt for an integer that exceeds a signed one of 64 bits.
  std::optional<Scalar> (*get)(const void* place) = nullptr;
  // Writes only if `write`. Returns false if the variable cannot hold the value.
  bool (*set)(void* place, const Scalar& value, bool write) = nullptr;
};

template <class T>
Variable variable(T* place) {
  Variable made;
  made.place = place;
  made.get = [](const void* from) -> std::optional<Scalar> {
    const T& value = *static_cast<const T*>(from);
    if constexpr (std::integral<T> && !std::same_as<T, bool>) {
      constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      if (value > 0 && static_cast<std::uint64_t>(value) > kMost) return std::nullopt;
      return Scalar(static_cast<std::int64_t>(value));
    } else if constexpr (std::floating_point<T>) {
      return Scalar(static_cast<double>(value));
    } else {
      return Scalar(value);
    }
  };
  made.set = [](void* to, const Scalar& value, bool write) {
    using Kept = std::conditional_t<std::same_as<T, bool> || std::same_as<T, std::string>, T,
                                    std::conditional_t<std::integral<T>, std::int64_t, double>>;
    const Kept* const kept = std::get_if<Kept>(&value);
    if (kept == nullptr) return false;
    if constexpr (std::same_as<Kept, std::int64_t>) {
      if (*kept < static_cast<std::int64_t>(std::numeric_limits<T>::min())) return false;
      if (*kept > 0 && static_cast<std::uint64_t>(*kept) >
                           static_cast<std::uint64_t>(std::numeric_limits<T>::max()))
        return false;
    }
    // A float takes a value with fewer digits, but no value beyond its range.
    if constexpr (std::same_as<T, float>) {
      if (std::isfinite(*kept) &&
          std::abs(*kept) > static_cast<double>(std::numeric_limits<float>::max()))
        return false;
    }
    if (write) *static_cast<T*>(to) = static_cast<T>(*kept);
    return true;
  };
  return made;
}

// A std::vector of numbers of the program.
struct Numbers {
  void* place = nullptr;
  c10::ScalarType dtype{};
  std::size_t (*size)(const void* place) = nullptr;
  // Copies all elements to `to`.
  void (*get)(const void* place, void* to) = nullptr;
  void (*set)(void* place, const void* from, std::size_t size) = nullptr;
};

template <class T>
constexpr c10::ScalarType dtype_of() {
  if constexpr (std::same_as<T, bool>) return c10::ScalarType::Bool;
  if constexpr (std::floating_point<T>)
    return sizeof(T) == 4 ? c10::ScalarType::Float : c10::ScalarType::Double;
  constexpr c10::ScalarType kSigned[] = {c10::ScalarType::Char, c10::ScalarType::Short,
                                         c10::ScalarType::Int, c10::ScalarType::Long};
  constexpr c10::ScalarType kUnsigned[] = {c10::ScalarType::Byte, c10::ScalarType::UInt16,
                                           c10::ScalarType::UInt32, c10::ScalarType::UInt64};
  constexpr std::size_t kWidth = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
  return std::is_signed_v<T> ? kSigned[kWidth] : kUnsigned[kWidth];
}

template <class T>
Numbers numbers(std::vector<T>* place) {
  Numbers made;
  made.place = place;
  made.dtype = dtype_of<T>();
  made.size = [](const void* from) { return static_cast<const std::vector<T>*>(from)->size(); };
  made.get = [](const void* from, void* to) {
    std::copy_n(static_cast<const std::vector<T>*>(from)->begin(),
                static_cast<const std::vector<T>*>(from)->size(), static_cast<T*>(to));
  };
  made.set = [](void* to, const void* from, std::size_t size) {
    const T* const first = static_cast<const T*>(from);
    static_cast<std::vector<T>*>(to)->assign(first, first + size);
  };
  return made;
}

template <class T>
constexpr bool kIsNumbers = false;
template <class T>
constexpr bool kIsNumbers<std::vector<T>> =
    std::integral<T> || std::same_as<T, float> || std::same_as<T, double>;

// An object that writes itself to an archive and reads itself from one.
struct Archived {
  std::shared_ptr<void> place;
  void (*save)(const void* place, torch::serialize::OutputArchive& archive) = nullptr;
  void (*load)(void* place, torch::serialize::InputArchive& archive) = nullptr;
};
WEFT_API Archived archived(const at::Generator& generator);
WEFT_API Archived archived(torch::optim::LRScheduler& scheduler);
WEFT_API Archived archived(torch::optim::ReduceLROnPlateauScheduler& scheduler);
template <class T>
Archived archived_object(T& value) {
  Archived made;
  made.place = std::shared_ptr<void>(std::shared_ptr<void>(), &value);
  made.save = [](const void* from, torch::serialize::OutputArchive& to) {
    static_cast<const T*>(from)->save(to);
  };
  made.load = [](void* to, torch::serialize::InputArchive& from) {
    static_cast<T*>(to)->load(from);
  };
  return made;
}

template <class T>
concept SavesItself = requires(T& value, torch::serialize::OutputArchive& to,
                               torch::serialize::InputArchive& from) {
  static_cast<const T&>(value).save(to);
  value.load(from);
};

// The argument of a part that each rank has for itself.
template <class T>
struct PerRank {
  T&& value;
};

template <class T>
concept LeadsToModule = requires(T& value) {
  static_cast<torch::nn::Module&>(*value);
};
template <class T>
concept LeadsToOptimizer = requires(T& value) {
  static_cast<torch::optim::Optimizer&>(*value);
};
// A GradScaler.
template <class T>
concept HasState = requires(T& value) {
  { value.checkpoint_state() } -> std::same_as<std::vector<at::Tensor>&>;
};
template <class T>
constexpr bool kNoPart = false;

}  // namespace detail

// A name, unique in its checkpoint, and the value stored under it: a variable of the program, or a
// pointer or holder of one. Part refers to the variable, which must outlive it. It copies a
// constant or a temporary; save() accepts these and load() refuses them.
class Part {
 public:
  // - a torch::nn module, its holder, or a (shared) pointer to it: parameters and buffers. Values
  //   that your class writes in a save() of its own need a Part of their own. Of a
  //   DistributedDataParallel or FullyShardedDataParallel, give its module().
  // - any torch::optim::Optimizer: options and state. A weft::ZeroRedundancyOptimizer is
  //   consolidated and written as the plain optimizer over the same parameters would be; either
  //   loads it.
  // - an at::Tensor or a std::vector of them. load() writes into the existing memory; an undefined
  //   tensor or an empty vector takes the tensors of the file, on the group's device.
  // - a bool, an integer, a float or double, a std::string, a std::vector of numbers.
  // - a GradScaler: its scale and its options.
  // - a torch::Generator; a learning-rate scheduler (of the optimizer's parts, give both: the
  //   learning rates are the optimizer's).
  // - an object with save(OutputArchive&) const and load(InputArchive&), such as a
  //   DistributedSampler, whose position in the epoch counts the examples of all ranks, so that
  //   another number of ranks continues there. load() of the object is called several times.
  template <class T>
  Part(std::string name, T&& value) : name_(std::move(name)) {
    using Value = std::remove_cvref_t<T>;
    is_constant_ = !std::is_lvalue_reference_v<T> || std::is_const_v<std::remove_reference_t<T>>;
    if constexpr (std::integral<Value> || std::same_as<Value, float> ||
                  std::same_as<Value, double>) {
      content_ = detail::variable(place_of<Value>(value));
    } else if constexpr (std::convertible_to<const Value&, std::string>) {
      content_ = detail::variable(place_of<std::string>(value));
    } else if constexpr (std::same_as<Value, at::Tensor> ||
                         std::same_as<Value, std::vector<at::Tensor>>) {
      content_ = place_of<Value>(value);
    } else if constexpr (detail::HasState<Value>) {
      static_assert(std::is_lvalue_reference_v<T>, "this would be gone before it is saved");
      is_constant_ = false;
      content_ = &const_cast<Value&>(value).checkpoint_state();
    } else if constexpr (detail::kIsNumbers<Value>) {
      content_ = detail::numbers(place_of<Value>(value));
    } else if constexpr (std::same_as<Value, at::Generator>) {
      is_constant_ = false;  // a handle
      content_ = detail::archived(value);
    } else if constexpr (std::is_base_of_v<torch::nn::Module, Value>) {
      static_assert(std::is_lvalue_reference_v<T>, "this module would be gone before it is saved");
      content_ = static_cast<torch::nn::Module*>(const_cast<Value*>(&value));
    } else if constexpr (std::is_base_of_v<torch::optim::Optimizer, Value>) {
      static_assert(std::is_lvalue_reference_v<T>,
                    "this optimizer would be gone before it is saved");
      content_ = static_cast<torch::optim::Optimizer*>(const_cast<Value*>(&value));
    } else if constexpr (detail::LeadsToModule<Value>) {
      is_constant_ = false;
      content_ = leads_nowhere(value)
                     ? nullptr
                     : &static_cast<torch::nn::Module&>(*const_cast<Value&>(value));
    } else if constexpr (detail::LeadsToOptimizer<Value>) {
      is_constant_ = false;
      content_ = leads_nowhere(value)
                     ? nullptr
                     : &static_cast<torch::optim::Optimizer&>(*const_cast<Value&>(value));
    } else if constexpr (std::is_base_of_v<torch::optim::LRScheduler, Value> ||
                         std::is_base_of_v<torch::optim::ReduceLROnPlateauScheduler, Value>) {
      static_assert(std::is_lvalue_reference_v<T>,
                    "this scheduler would be gone before it is saved");
      content_ = detail::archived(const_cast<Value&>(value));
    } else if constexpr (detail::SavesItself<Value>) {
      static_assert(std::is_lvalue_reference_v<T>, "this object would be gone before it is saved");
      content_ = detail::archived_object(const_cast<Value&>(value));
    } else {
      static_assert(
          detail::kNoPart<Value>,
          "a checkpoint's part is a torch::nn module (of a DistributedDataParallel: its module()), "
          "a torch::optim optimizer or scheduler, an at::Tensor, a std::vector<at::Tensor>, a "
          "weft::GradScaler, a "
          "bool, "
          "an integer, a float, a double, a std::string, a std::vector of numbers, a "
          "torch::Generator, or an object with save(OutputArchive&) const and "
          "load(InputArchive&); #include the header that defines its class");
    }
  }
  // A value of each rank's own: see per_rank().
  template <class T>
  Part(std::string name, detail::PerRank<T> own)
      : Part(std::move(name), std::forward<T>(own.value)) {
    is_per_rank_ = true;
  }

  // The name under which the value is stored.
  const std::string& name() const { return name_; }

 private:
  friend struct Contents;
  friend Part per_rank(Part part);
  using Content =
      std::variant<torch::nn::Module*, torch::optim::Optimizer*, at::Tensor*,
                   std::vector<at::Tensor>*, detail::Variable, detail::Numbers, detail::Archived>;

  // True for a null pointer or an empty holder, which save() and load() report on all ranks.
  template <class T>
  static bool leads_nowhere(const T& value) {
    if constexpr (requires { static_cast<bool>(value); }) return !static_cast<bool>(value);
    return false;
  }

  template <class Kept, class T>
  Kept* place_of(T& value) {
    if constexpr (std::same_as<T, Kept>) {
      if (!is_constant_) return &value;
    }
    is_constant_ = true;
    auto copy = std::make_shared<Kept>(value);
    kept_ = copy;
    return copy.get();
  }

  std::string name_;
  Content content_;
  bool is_constant_ = false;
  bool is_per_rank_ = false;
  std::shared_ptr<void> kept_;
};

// A part of which each rank saves and loads its own value, for save_async():
//   {"random", weft::checkpoint::per_rank(generator)}
// Ranks beyond the number that has saved keep their value; load() warns of it.
template <class T>
requires(!std::same_as<std::remove_cvref_t<T>, Part>) detail::PerRank<T> per_rank(T&& value) {
  return {std::forward<T>(value)};
}
// The same for a part that has its name already.
inline Part per_rank(Part part) {
  part.is_per_rank_ = true;
  return part;
}

// Writes rank 0's parts to one file; every rank names the same parts. Returns when the file is
// complete on rank 0's disk and has replaced the previous one, which stays intact until then. The
// file keeps the previous one's permissions; if `file` is a symbolic link, the link stays. Copies
// tensors of GPUs to the host. Throws Caller if the file cannot be written, the parts differ
// between ranks or one is per_rank(); Busy if the disk is full or another process is writing the
// file.
WEFT_API void save(const std::string& file, ProcessGroup group, const std::vector<Part>& parts);

// Options of save_async(), the same on all ranks.
struct SaveOptions {
  // How many whole checkpoints stay in the folder. The older ones are removed after a new one is
  // whole.
  int keep = 1;
  // Of a group's checkpoint, on GPUs: the current streams copy the values within the GPU, and its
  // next kernels run beside the copies to the host. Until these have been made, that takes as much
  // memory of the GPU as this rank writes, which the next step must be able to spare. Otherwise the
  // current streams copy to the host, and their next kernels wait.
  bool stage_on_gpu = false;
};

// A checkpoint that is being written. It is not collective: ranks call its functions at any time.
// While it lives, it keeps the memory of its copies for the next save_async(), which is then
// faster: assign that to the same variable.
class WEFT_API [[nodiscard]] Saving {
 public:
  // Nothing is being written.
  Saving();
  // The other object then waits for nothing.
  Saving(Saving&&) noexcept;
  // Waits for the previous one, as the destructor does.
  Saving& operator=(Saving&&) noexcept;
  // Waits, and logs an error that wait() has not thrown.
  ~Saving();

  // Returns when all parts and the manifest are on disk, on all ranks. Throws on all ranks what
  // went wrong on one, naming it: Busy for a full disk, Caller for a folder that cannot be written,
  // PeerLost for a rank that died, Timeout if a rank takes longer than the group's timeout after
  // this one has written. The previous checkpoint is whole then.
  void wait();
  // True once wait() would not block.
  bool query() const;

 private:
  friend struct SavingAccess;
  struct State;
  std::shared_ptr<State> state_;
};

// Copies the parts' values and returns; training may change them from then on. A thread of each
// rank writes FOLDER/NUMBER: one .safetensors file a rank, then a manifest, which makes the
// checkpoint whole: whenever the job ends, there is the old checkpoint or the new one. `folder` is
// on a file system that all ranks share; it is made if only its last part is missing. Waits for the
// previous save_async() of the group.
//
// Every rank names the same parts. Parameters of modules and the state of optimizers must be equal
// on all ranks, as DistributedDataParallel keeps them: each rank writes its share of them. Of a
// ZeroRedundancyOptimizer each rank writes the state that it has, and of a sharded model and its
// optimizer the rows that it has; nothing is gathered. Everything else is rank 0's,
// except parts that are per_rank(). The copies are in host memory until they are written. From a
// GPU they go to pinned memory, in the order of the current streams, and the host does not wait for
// them: whatever is enqueued behind the call, such as an optimizer's step, may write the values.
// See SaveOptions::stage_on_gpu.
WEFT_API Saving save_async(std::string folder, ProcessGroup group, std::vector<Part> parts,
                           SaveOptions options = {});

// Throws the errors of save() and save_async() for this file or folder that can be known
// beforehand; changes nothing. A program calls it before it computes for hours and then saves.
WEFT_API void check_writable(const std::string& path, ProcessGroup group);

// True if the file exists on rank 0, or the folder there has a whole checkpoint.
WEFT_API bool exists(const std::string& path, ProcessGroup group);

// Loads the parts, which may be fewer than were saved, from a file of save(), or from a folder:
// FOLDER (the newest whole checkpoint in it; a warning names a newer one that was cut off),
// FOLDER/NUMBER, or a folder of safetensors files of PyTorch's HuggingFaceStorageWriter. Of a file,
// rank 0 sends the bytes; of a folder, each rank reads what it needs, of sharded parameters its own
// rows, and what is read is compared with its checksums. So all ranks continue from the same state;
// each rank copies it to the devices of its own module and optimizer. A load of a folder waits for
// earlier calls of save_async() over the group.
//
// All or nothing: names, shapes and dtypes are compared on every rank before anything changes.
// Throws Caller on all ranks, with the difference, if the parts do not fit on one rank, and if it
// is not a checkpoint or is damaged. An optimizer loses the state of parameters for which the
// checkpoint has none; its load() is called twice. Values that all ranks need are read last, to the
// memory of the parts: if the disk fails then, the error says that some of them have changed.
WEFT_API void load(const std::string& path, ProcessGroup group, const std::vector<Part>& parts);

}  // namespace weft::checkpoint
