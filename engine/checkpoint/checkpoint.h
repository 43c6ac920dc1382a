// Checkpoints: what a job goes on from after it has ended, whatever ended it.
//
//   const std::vector<weft::checkpoint::Part> parts = {{"model", net}, {"optimizer", optimizer},
//   {"epoch", epoch}}; if (weft::checkpoint::exists("run.pt", group))
//   weft::checkpoint::load("run.pt", group, parts); … weft::checkpoint::save("run.pt", group,
//   parts);
//
// Rank 0 writes and reads the file, whose name the other ranks only mention; no file system needs
// to be shared. A file written by any number of ranks is read by any other number. It is an archive
// of libtorch: torch::serialize::InputArchive reads it, with an archive for each module and
// optimizer in it.
//
// All calls are collective, block, and either return on all ranks or throw one error on all ranks.
// What rank 0 reads and writes meanwhile counts against the group's timeout. The parts are used by
// one thread at a time.
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

// A variable of the program: its value, and whether it can hold another, which it takes if it is
// to.
struct Variable {
  void* place = nullptr;
  std::optional<Scalar> (*get)(const void* place) =
      nullptr;  // nullopt: an integer above those of 64 bits with a sign
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
    if constexpr (std::same_as<T, float>) {  // fewer digits are taken, another number is not
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
template <class T>
constexpr bool kNoPart = false;

}  // namespace detail

// A name, unique in its checkpoint, and what is kept under it: a variable of the program, or what
// leads to one. It refers to that, which outlives it; of a constant or a temporary it has a copy,
// which save() takes and load() refuses.
class Part {
 public:
  // - a torch::nn module, its holder, or a (shared) pointer to it: parameters and buffers. (What a
  // class of your own keeps
  //   besides, by a save() of its own, is a part of its own. Of a DistributedDataParallel: its
  //   module().)
  // - any torch::optim::Optimizer: options and state. A weft::ZeroRedundancyOptimizer is
  // consolidated, and its part is
  //   what the plain optimizer with the same parameters writes; either loads it.
  // - an at::Tensor or a std::vector of them. load() writes into the memory that is there; an
  // undefined tensor, or an empty
  //   vector, takes what the file has, on the group's device.
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
      static_assert(detail::kNoPart<Value>,
                    "a checkpoint's part is a torch::nn module (of a DistributedDataParallel: its "
                    "module()), a torch::optim "
                    "optimizer, an at::Tensor, a std::vector<at::Tensor>, a bool, an integer, a "
                    "float, a double or a "
                    "std::string; #include what defines it");
    }
  }

  const std::string& name() const { return name_; }

 private:
  friend struct Contents;
  using Content = std::variant<torch::nn::Module*, torch::optim::Optimizer*, at::Tensor*,
                               std::vector<at::Tensor>*, detail::Variable>;

  // A null pointer, or an empty holder: save() and load() say so, on all ranks.
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

// Returns when the file is on rank 0's disk, whole, in place of the one that was there; until then
// that one stays, whatever happens. It keeps that one's permissions, and a link stays a link. Every
// rank names the same parts; what rank 0 has is saved. Tensors of GPUs are copied to the host.
// Throws Caller where the file cannot be written and for parts that differ between ranks, Busy for
// a full disk and for a file that another process is writing.
WEFT_API void save(const std::string& file, ProcessGroup group, const std::vector<Part>& parts);

// Throws what save() would for this file, as far as that can be known beforehand; changes nothing.
// A program calls it before the hours after which it saves.
WEFT_API void check_writable(const std::string& file, ProcessGroup group);

// Whether there is such a file, on rank 0.
WEFT_API bool exists(const std::string& file, ProcessGroup group);

// Takes the parts from the file, whatever else it has in it. The bytes travel from rank 0, so that
// all ranks go on from the same; each takes them to the devices of its own module and optimizer.
// All or nothing: before anything changes, names, shapes and dtypes are compared on every rank.
// Throws Caller on all ranks, with what differs, where they do not fit on one, and where the file
// is no checkpoint or is damaged. An optimizer loses the state of parameters for which the file has
// none; its load() is called twice.
WEFT_API void load(const std::string& file, ProcessGroup group, const std::vector<Part>& parts);

}  // namespace weft::checkpoint
