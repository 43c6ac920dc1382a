// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <sstream>

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/serialize/archive.h>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/part_staging.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit.h>
#include <weft/engine/tensor/private_members.h>
#include <weft/engine/zero/zero.h>

namespace weft::checkpoint {

// The private counts of a ReduceLROnPlateauScheduler.
namespace {
struct OfBest;
struct OfBadEpochs;
struct OfCooldown;
struct OfLastEpoch;
}  // namespace

}  // namespace weft::checkpoint

template struct weft::tensor::Reveal<weft::checkpoint::OfBest,
                                     &torch::optim::ReduceLROnPlateauScheduler::best>;
template struct weft::tensor::Reveal<weft::checkpoint::OfBadEpochs,
                                     &torch::optim::ReduceLROnPlateauScheduler::num_bad_epochs>;
template struct weft::tensor::Reveal<weft::checkpoint::OfCooldown,
                                     &torch::optim::ReduceLROnPlateauScheduler::cooldown_counter>;
template struct weft::tensor::Reveal<weft::checkpoint::OfLastEpoch,
                                     &torch::optim::ReduceLROnPlateauScheduler::last_epoch>;

namespace weft::checkpoint {

namespace {

using group::error_of;
using parallel::ShardedOptimizer;
using torch::optim::LRScheduler;
using torch::optim::Optimizer;
using torch::optim::ReduceLROnPlateauScheduler;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

std::vector<std::string> parameters_of(const Optimizer& optimizer) {
  std::vector<std::string> lines;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      lines.push_back("parameter " + std::to_string(i) + " of group " + std::to_string(g) + " is " +
                      whole_form_of(parameters[i]));
    }
  }
  return lines;
}

// Clears a list that LBFGS keeps from its last iteration: the next one fills it anew, and libtorch
// cannot write it.
void drop_scratch(Optimizer& optimizer) {
  for (const auto& [parameter, state] : optimizer.state()) {
    auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(state.get());
    if (lbfgs != nullptr) lbfgs->al(std::nullopt);
  }
}

void check_parameters(InputArchive& archive, const Optimizer& optimizer) {
  c10::IValue value;
  if (!archive.try_read(kParameters, value) || !value.isList())
    throw Error(Blame::Caller, "it is not an optimizer in the file");
  std::vector<std::string> in_file;
  for (const c10::IValue& line : value.toListRef()) in_file.push_back(line.toStringRef());
  const std::vector<std::string> here = parameters_of(optimizer);
  for (std::size_t i = 0; i < std::min(in_file.size(), here.size()); ++i) {
    if (in_file[i] != here[i])
      throw Error(Blame::Caller, "the optimizer's parameters differ: " + in_file[i] +
                                     " in the file, " + here[i] + " here");
  }
  if (in_file.size() != here.size()) {
    throw Error(Blame::Caller, "the file has the state of " + std::to_string(in_file.size()) +
                                   " parameters, the optimizer here " +
                                   std::to_string(here.size()));
  }
}

// Copies the states to their parameters' devices, since the archive was read to the host. Only a
// state's class knows its members, so this writes the state to an archive and reads it back.
void bring_states_to_parameters(Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (parameter.is_cpu() || found == optimizer.state().end()) continue;
      OutputArchive out;
      found->second->serialize(out);
      std::stringstream stream;
      out.save_to(stream);
      InputArchive in;
      in.load_from(stream, parameter.device());
      found->second->serialize(in);
    }
  }
}

// Throws if the archive is of another class of optimizer; the optimizer may have changed by then.
void load_whole(Optimizer& optimizer, InputArchive& archive) {
  optimizer.state().clear();
  const auto failure = error_of([&] { optimizer.load(archive); });
  if (!failure) return;
  // libtorch's classes report a missing option by such an assertion.
  if (failure->text().find("INTERNAL ASSERT FAILED") == std::string::npos) throw *failure;
  throw Error(Blame::Caller,
              "the options or the state in the file are those of another class of optimizer");
}

// While it lives, the optimizer has a copy of its param_groups, with the same parameters, and no
// state.
class Aside {
 public:
  explicit Aside(Optimizer& optimizer) : optimizer_(optimizer), groups_(optimizer.param_groups()) {
    swap();
  }
  ~Aside() { swap(); }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  void swap() {
    optimizer_.param_groups().swap(groups_);
    optimizer_.state().swap(state_);
  }
  Optimizer& optimizer_;
  std::vector<torch::optim::OptimizerParamGroup> groups_;
  std::remove_reference_t<decltype(optimizer_.state())> state_;
};

// libtorch's schedulers have no save(). The count of LRScheduler is protected, so a derived class
// may name it.
struct OpenScheduler : LRScheduler {
  static unsigned& count(LRScheduler& scheduler) {
    return scheduler.*(&OpenScheduler::step_count_);
  }
};
std::int64_t integer_at(InputArchive& archive, const char* key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt())
    throw Error(Blame::Caller, "it is of another kind in the file: there is no integer '" +
                                   std::string(key) + "'");
  return value.toInt();
}

}  // namespace

// --- optimizers

void save_optimizer(OutputArchive& archive, Optimizer& optimizer) {
  drop_scratch(optimizer);
  optimizer.save(archive);
  archive.write(kParameters, c10::IValue(c10::List<std::string>(parameters_of(optimizer))));
}

Commit stage_optimizer(const std::shared_ptr<InputArchive>& archive, Optimizer& optimizer) {
  check_parameters(*archive, optimizer);
  if (auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer)) {
    const std::shared_ptr<Optimizer> whole = sharded->plain();
    load_whole(*whole, *archive);
    bring_states_to_parameters(*whole);
    return [sharded, whole] { sharded->take(*whole); };
  }
  // A first load, into a copy of its groups, shows any error beforehand. The commit loads once more
  // into the optimizer's own options, because there may be references to these, and because values
  // on the host may have been read since then.
  using State = std::remove_reference_t<decltype(optimizer.state())>;
  const auto state = std::make_shared<State>();
  const Aside aside(optimizer);
  load_whole(optimizer, *archive);
  bring_states_to_parameters(optimizer);
  state->swap(optimizer.state());
  return [archive, state, &optimizer] {
    optimizer.state().clear();
    optimizer.load(*archive);
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const auto staged = state->find(parameter.unsafeGetTensorImpl());
        if (parameter.is_cpu() || staged == state->end()) continue;
        optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(staged->second);
      }
    }
  };
}

// --- objects

namespace detail {

Archived archived(const at::Generator& generator) {
  Archived made;
  if (!generator.defined()) return made;
  made.place = std::make_shared<at::Generator>(generator);
  made.save = [](const void* from, OutputArchive& to) {
    to.write("state", static_cast<const at::Generator*>(from)->get_state(), true);
  };
  made.load = [](void* to, InputArchive& from) {
    at::Tensor state;
    from.read("state", state, true);
    static_cast<at::Generator*>(to)->set_state(state);
  };
  return made;
}

Archived archived(LRScheduler& scheduler) {
  Archived made;
  made.place = std::shared_ptr<void>(std::shared_ptr<void>(), &scheduler);
  made.save = [](const void* from, OutputArchive& to) {
    auto& own = *static_cast<LRScheduler*>(const_cast<void*>(from));
    to.write("step_count", c10::IValue(static_cast<std::int64_t>(OpenScheduler::count(own))));
  };
  made.load = [](void* to, InputArchive& from) {
    const std::int64_t count = integer_at(from, "step_count");
    OpenScheduler::count(*static_cast<LRScheduler*>(to)) = static_cast<unsigned>(count);
  };
  return made;
}

Archived archived(ReduceLROnPlateauScheduler& scheduler) {
  Archived made;
  made.place = std::shared_ptr<void>(std::shared_ptr<void>(), &scheduler);
  made.save = [](const void* from, OutputArchive& to) {
    const auto& own = *static_cast<const ReduceLROnPlateauScheduler*>(from);
    const auto number = [](int value) { return c10::IValue(static_cast<std::int64_t>(value)); };
    to.write("best", c10::IValue(static_cast<double>(own.*tensor::revealed<OfBest>())));
    to.write("num_bad_epochs", number(own.*tensor::revealed<OfBadEpochs>()));
    to.write("cooldown_counter", number(own.*tensor::revealed<OfCooldown>()));
    to.write("last_epoch", number(own.*tensor::revealed<OfLastEpoch>()));
  };
  made.load = [](void* to, InputArchive& from) {
    auto& own = *static_cast<ReduceLROnPlateauScheduler*>(to);
    c10::IValue best;
    if (!from.try_read("best", best) || !best.isDouble())
      throw Error(Blame::Caller, "it is of another kind in the file: there is no number 'best'");
    const std::int64_t bad = integer_at(from, "num_bad_epochs");
    const std::int64_t cooldown = integer_at(from, "cooldown_counter");
    const std::int64_t last = integer_at(from, "last_epoch");
    own.*tensor::revealed<OfBest>() = static_cast<float>(best.toDouble());
    own.*tensor::revealed<OfBadEpochs>() = static_cast<int>(bad);
    own.*tensor::revealed<OfCooldown>() = static_cast<int>(cooldown);
    own.*tensor::revealed<OfLastEpoch>() = static_cast<int>(last);
  };
  return made;
}

}  // namespace detail

// Only the object knows what it accepts. So this loads the new state to see whether it does, and
// then the former state again.
Commit stage_archived(const std::shared_ptr<InputArchive>& archive,
                      const detail::Archived& object) {
  OutputArchive before;
  object.save(object.place.get(), before);
  std::stringstream stream;  // a copy: `before` has the object's own tensors
  before.save_to(stream);
  InputArchive again;
  again.load_from(stream);
  const auto failure = error_of([&] { object.load(object.place.get(), *archive); });
  object.load(object.place.get(), again);
  if (failure) throw *failure;
  return [archive, object] { object.load(object.place.get(), *archive); };
}

// --- lists of numbers

at::Tensor tensor_of(const detail::Numbers& numbers) {
  const auto size = static_cast<std::int64_t>(numbers.size(numbers.place));
  at::Tensor tensor = at::empty({size}, at::TensorOptions(numbers.dtype));
  if (size > 0) numbers.get(numbers.place, tensor.mutable_data_ptr());
  return tensor;
}

Commit stage_numbers(const at::Tensor& value, const detail::Numbers& numbers) {
  if (value.dim() != 1 || value.scalar_type() != numbers.dtype) {
    differs("it", form_of(value),
            "a list of numbers of type " + std::string(c10::toString(numbers.dtype)));
  }
  return [value = value.cpu().contiguous(), numbers] {
    numbers.set(numbers.place, value.const_data_ptr(), static_cast<std::size_t>(value.numel()));
  };
}

// --- words

std::string in_quotes(const std::string& name) { return "'" + name + "'"; }

std::string form_of(c10::ScalarType dtype, at::IntArrayRef sizes) {
  std::ostringstream text;
  text << c10::toString(dtype) << " " << sizes;
  return text.str();
}

std::string form_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  std::ostringstream text;
  text << form_of(tensor.scalar_type(), tensor.sizes());
  if (tensor.layout() != at::kStrided) text << " " << tensor.layout();
  return text.str();
}

std::string whole_form_of(const at::Tensor& tensor) {
  const auto [unit, place] = shard::owner_of(tensor);
  if (!unit) return form_of(tensor);
  return form_of(tensor.scalar_type(), unit->parameters()[place].sizes);
}

[[noreturn]] void differs(const std::string& what, const std::string& in_file,
                          const std::string& here) {
  throw Error(Blame::Caller, what + " is " + in_file + " in the file and " + here + " here");
}

}  // namespace weft::checkpoint
