// SPDX-License-Identifier: Apache-2.0
// Checkpoints: files from which a job continues after it has ended, for any reason.
//
//   const std::vector<weft::checkpoint::Part> parts = {
//       {"model", net}, {"optimizer", optimizer}, {"epoch", epoch}};
//   if (weft::checkpoint::exists("run.pt", group)) weft::checkpoint::load("run.pt", group, parts);
//   …
//   weft::checkpoint::save("run.pt", group, parts);
//
// Rank 0 writes and reads the file. The other ranks only name it, so no file system needs to be
// shared. A file written by any number of ranks can be read by any other number. It is an archive
// of libtorch with an inner archive for each module and optimizer; torch::serialize::InputArchive
// reads it.
//
// All calls are collective, block, and either return on all ranks or throw one error on all ranks.
// The time in which rank 0 reads and writes counts against the group's timeout. One thread at a
// time uses the parts.
#pragma once

#include <cmath>
#include <concepts>
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

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

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
  //   DistributedDataParallel, give its module().
  // - any torch::optim::Optimizer: options and state. A weft::ZeroRedundancyOptimizer is
  //   consolidated and written as the plain optimizer over the same parameters would be; either
  //   loads it.
  // - an at::Tensor or a std::vector of them. load() writes into the existing memory; an undefined
  //   tensor or an empty vector takes the tensors of the file, on the group's device.
  // - a GradScaler: its scale and its options.
  // - a bool, an integer, a float or double, a std::string.
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
    } else {
      static_assert(
          detail::kNoPart<Value>,
          "a checkpoint's part is a torch::nn module (of a DistributedDataParallel: its module()), "
          "a torch::optim optimizer, an at::Tensor, a std::vector<at::Tensor>, a "
          "weft::GradScaler, a bool, an integer, a float, a double or a std::string; #include the "
          "header that defines its class");
    }
  }

  // The name under which the value is stored.
  const std::string& name() const { return name_; }

 private:
  friend struct Contents;
  using Content = std::variant<torch::nn::Module*, torch::optim::Optimizer*, at::Tensor*,
                               std::vector<at::Tensor>*, detail::Variable>;

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
  std::shared_ptr<void> kept_;
};

// Writes rank 0's parts; every rank names the same parts. Returns when the file is complete on rank
// 0's disk and has replaced the previous one, which stays intact until then. The file keeps the
// previous one's permissions; if `file` is a symbolic link, the link stays. Copies tensors of GPUs
// to the host. Throws Caller if the file cannot be written or the parts differ between ranks, and
// Busy if the disk is full or another process is writing the file.
WEFT_API void save(const std::string& file, ProcessGroup group, const std::vector<Part>& parts);

// Throws the errors of save() for this file that can be known beforehand; changes nothing. A
// program calls it before it computes for hours and then saves.
WEFT_API void check_writable(const std::string& file, ProcessGroup group);

// True if the file exists on rank 0.
WEFT_API bool exists(const std::string& file, ProcessGroup group);

// Loads the parts from the file, which may have others. Rank 0 sends the bytes, so that all ranks
// continue from the same state; each rank copies them to the devices of its own module and
// optimizer. All or nothing: names, shapes and dtypes are compared on every rank before anything
// changes. Throws Caller on all ranks, with the difference, if the parts do not fit on one rank,
// and if the file is not a checkpoint or is damaged. An optimizer loses the state of parameters for
// which the file has none; its load() is called twice.
WEFT_API void load(const std::string& file, ProcessGroup group, const std::vector<Part>& parts);

}  // namespace weft::checkpoint
