// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <sstream>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <weft/engine/group/called_by.h>
#include <weft/engine/group/rows.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/meta_tensors.h>
#include <weft/engine/shard/unit.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/description.h>

namespace weft::shard {

namespace {

constexpr std::size_t kAlignment = 512;  // of parameters in gathered memory; as CUDA's allocators

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// True if each row is one block of memory and the rows lie one behind the other.
bool has_dense_rows(const at::Tensor& tensor) {
  return tensor.dim() == 0 || tensor.is_contiguous() ||
         (tensor.is_non_overlapping_and_dense() &&
          tensor.stride(0) == tensor.numel() / tensor.size(0));
}

// The error of programs that read a parameter's memory without an operator.
std::string not_gathered(const std::string& name) {
  return "parameter '" + name +
         "' is not gathered: its memory exists while the forward and backward of its sharded model "
         "use it; read it under weft::FullParameters, or, in a forward, take the pointer of "
         "parameter.detach(), which is an operator and so gathers it";
}

// The error of an optimizer that was made before sharding, and of programs that read the .grad of a
// module's member.
std::string gradient_elsewhere(const std::string& name) {
  return "parameter '" + name +
         "' is sharded, and its gradient is not in the .grad of the module's member but in that of "
         "its shard, which model->parameters() has; make optimizers of model->parameters(), after "
         "sharding";
}

std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << " " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

// The same memory without the shard's owner: an operation may keep it longer than the group lives.
at::Tensor plain(const at::Tensor& shard) {
  return at::empty({0}, shard.options().requires_grad(false))
      .set_(shard.storage(), shard.storage_offset(), shard.sizes(), shard.strides());
}

// Copies rows to memory of their own, for a shard.
at::Tensor shard_like(const at::Tensor& rows, bool is_pinned) {
  at::Tensor made = is_pinned ? Offload::pinned(rows.sizes(), rows.strides(), rows.scalar_type())
                              : at::empty_strided(rows.sizes(), rows.strides(), rows.options());
  made.copy_(rows);
  return made;
}

// The memory of a dense tensor, which need not be contiguous.
Slice bytes_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.nbytes(), tensor::device_of(tensor.device())};
}

const char* name_of_operations(const std::string& unit) {
  return trace::keep("FullyShardedDataParallel's " +
                     (unit.empty() ? "root" : "unit '" + unit + "'"));
}

// `place`: the memory of the whole parameter.
group::SpreadRows spread_rows(const ProcessGroup& group, const UnitParameter& parameter,
                              const at::Tensor& shard, const Slice& place) {
  const std::size_t row_bytes =
      static_cast<std::size_t>(parameter.row_elements) * shard.element_size();
  group::SpreadRows rows;
  for (int rank = 0; rank < group.size(); ++rank) {
    Rows part = parameter.rows(rank, group.size());
    if (parameter.is_scalar && rank > 0) part = {1, 0};
    rows.all.push_back(place.part(static_cast<std::size_t>(part.first) * row_bytes,
                                  static_cast<std::size_t>(part.count) * row_bytes));
  }
  rows.mine = bytes_of(shard);
  rows.mine.bytes = rows.all[static_cast<std::size_t>(group.rank())].bytes;
  return rows;
}

// Adds what a gather into `memory` takes of the unit's shards. On a GPU, copies of them are made on
// the current stream, and lent.
void add_rows(const Unit& unit, const Slice& memory, Loan& lent,
              std::vector<group::SpreadRows>& spread, std::vector<at::Tensor>& tensors) {
  for (const UnitParameter& parameter : unit.parameters()) {
    if (parameter.whole.numel() == 0) continue;
    const at::Tensor shard = plain(parameter.shard());
    at::Tensor rows = shard;
    if (unit.offloads()) rows = rows.to(unit.device(), /*non_blocking=*/true);
    rows = rows.to(parameter.whole.scalar_type());
    spread.push_back(spread_rows(unit.group(), parameter, rows,
                                 memory.part(parameter.offset, parameter.whole.nbytes())));
    tensors.push_back(rows.is_same(shard) ? rows : lent.lend(rows));
  }
}

// False if the program has given the module's member other memory, which libtorch allows.
bool has_shell(const Unit& unit, std::size_t place) {
  const Belongs* const belongs = belonging(unit.parameters()[place].whole);
  return belongs != nullptr && belongs->parameter == place && belongs->unit.lock().get() == &unit;
}

void require_shell(const Unit& unit, std::size_t place) {
  if (has_shell(unit, place)) return;
  throw Error(Blame::Caller,
              "the memory of parameter '" + unit.parameters()[place].name +
                  "' was replaced after it was sharded (set_data() of a module's member), so it "
                  "cannot be gathered; write values under weft::FullParameters(module, "
                  "/*writable=*/true)");
}

}  // namespace

at::Tensor UnitParameter::shard() const {
  const auto holder = module.lock();
  at::Tensor found = holder ? parameter_entry(*holder, key) : at::Tensor();
  const Owner owner = owner_of(found);
  if (owner.unit && owner.unit->parameters()[owner.parameter].whole.is_same(whole)) return found;
  throw Error(Blame::Caller,
              "the shard of parameter '" + name +
                  "' is gone: the module's parameters were replaced, moved or cast after it was "
                  "sharded; call module->to() before sharding, and write values under "
                  "weft::FullParameters(module, /*writable=*/true)");
}

std::vector<std::int64_t> UnitParameter::shape(std::int64_t rows) const {
  std::vector<std::int64_t> shape = sizes;
  if (!is_scalar) shape.front() = rows;
  return shape;
}

Unit::Unit(std::string name, std::uint32_t number, ModelRanks ranks,
           const FullyShardOptions& options)
    : called_by(name_of_operations(name)),
      pool(std::make_shared<ReceivePool>(/*most_idle=*/0)),
      offload(std::make_shared<Offload>()),
      name_(std::move(name)),
      number_(number),
      ranks_(std::move(ranks)),
      options_(options) {}

std::shared_ptr<Unit> Unit::make(std::string name, std::uint32_t number,
                                 const std::vector<Given>& given, ModelRanks ranks,
                                 const FullyShardOptions& options,
                                 std::vector<at::Tensor>& shards) {
  const c10::AutoGradMode no_grad(false);
  std::shared_ptr<Unit> unit(new Unit(std::move(name), number, std::move(ranks), options));
  unit->device_ = given.front().tensor.device();
  unit->parameters_.reserve(given.size());
  for (std::size_t i = 0; i < given.size(); ++i) shards.push_back(unit->add(given[i], i));
  return unit;
}

at::Tensor Unit::add(const Given& given, std::size_t place) {
  const at::Tensor whole =
      has_dense_rows(given.tensor) ? given.tensor.detach() : given.tensor.detach().contiguous();
  UnitParameter added;
  added.name = given.name;
  added.is_scalar = whole.dim() == 0;
  added.sizes = whole.sizes().vec();
  added.strides = whole.strides().vec();
  added.dtype = whole.scalar_type();
  added.row_elements = added.is_scalar ? 1 : whole.size(0) == 0 ? 0 : whole.numel() / whole.size(0);
  const Rows mine = added.rows(group().rank(), group().size());

  const at::Tensor rows = added.is_scalar ? whole : whole.narrow(0, mine.first, mine.count);
  at::Tensor shard = shard_like(rows, offloads());
  shard.set_requires_grad(given.tensor.requires_grad());
  set_owner(shard, shared_from_this(), place);
  added.module = given.module;
  added.key = given.key;

  const bool casts = options_.param_dtype && at::isFloatingType(added.dtype);
  const at::ScalarType dtype = casts ? *options_.param_dtype : added.dtype;
  become_shell(given.tensor, added.sizes, added.strides, dtype, {weak_from_this(), place},
               not_gathered(given.name));
  refuse_gradient(given.tensor, gradient_elsewhere(given.name));
  added.whole = given.tensor;
  added.offset = bytes_;
  bytes_ += aligned(added.whole.nbytes());
  parameters_.push_back(std::move(added));
  return shard;
}

void Unit::rename(std::size_t place, const std::string& name) {
  UnitParameter& parameter = parameters_[place];
  parameter.name = name;
  require_shell(*this, place);
  if (parameter.whole.numel() > 0) set_access_error(parameter.whole, not_gathered(name));
  refuse_gradient(parameter.whole, gradient_elsewhere(name));
}

std::vector<at::Tensor> Unit::shards() const {
  std::vector<at::Tensor> shards;
  shards.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const UnitParameter& parameter = parameters_[i];
    shards.push_back(parameter.shard());
    require_shell(*this, i);
    const at::Tensor& shard = shards.back();
    if (shard.is_meta()) {
      throw Error(Blame::Caller,
                  "parameter '" + parameter.name +
                      "' has no values yet: its model was built under weft::OnMeta; call "
                      "weft::materialize(model, seed) on all ranks first");
    }
    const std::int64_t rows = parameter.rows(group().rank(), group().size()).count;
    const bool is_same = shard.scalar_type() == parameter.dtype &&
                         shard.device() == (offloads() ? c10::Device(c10::kCPU) : device_) &&
                         shard.sizes() == at::IntArrayRef(parameter.shape(rows)) &&
                         has_dense_rows(shard);
    if (is_same) continue;
    throw Error(Blame::Caller, "the shard of parameter '" + parameter.name + "' is now " +
                                   shape_text(shard) +
                                   ", which it was not when it was sharded; call module->to() and "
                                   "load values before sharding, or under weft::FullParameters");
  }
  return shards;
}

std::uint64_t version_of(const std::vector<at::Tensor>& shards) {
  std::uint64_t sum = 0;
  for (const at::Tensor& shard : shards) sum += static_cast<std::uint64_t>(shard._version());
  return sum;
}

void Unit::start_gather() {
  if (state_ != State::Sharded) return;
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView untracked;
  gather_ = {};
  gather_.memory = transient(*this, static_cast<std::int64_t>(bytes_), at::kByte);
  note_stream();
  const Slice memory = tensor::slice_of(gather_.memory);
  std::vector<at::Tensor> tensors = {gather_.lent.lend(gather_.memory)};
  const auto gather = [&] {
    std::vector<group::SpreadRows> spread;
    add_rows(*this, memory, gather_.inputs_lent, spread, tensors);
    if (spread.empty()) return;
    const group::CalledBy by(called_by);
    gather_.work = group::all_gather_rows(group(), std::move(spread), std::move(tensors),
                                          "parameters of unit '" + name_ + "'", {0, number_});
  };
  try {
    if (offloads()) {
      offload->bring_in(device_, gather);
    } else {
      gather();
    }
  } catch (...) {
    gather_.memory.reset();
    throw;
  }
  state_ = State::Gathering;
}

void Unit::finish_gather() {
  if (state_ == State::Gathered) return;
  start_gather();
  try {
    for (std::size_t i = 0; i < parameters_.size(); ++i) require_shell(*this, i);
    gather_.work.wait();
  } catch (...) {
    free();
    throw;
  }
  gather_.inputs_lent.end_behind(gather_.work, /*current_waits=*/true);
  gather_.work = {};
  for (const UnitParameter& parameter : parameters_) {
    if (parameter.whole.numel() > 0) fill(parameter.whole, gather_.memory, parameter.offset);
  }
  gather_.memory.reset();
  state_ = State::Gathered;
  note_stream();
}

void Unit::free() {
  if (state_ == State::Sharded) return;
  // The allocator may give the memory out again on the stream that it was allocated on, so that
  // stream waits for the others.
  for (std::size_t i = 1; i < gather_.streams.size(); ++i) {
    c10::Event used(gather_.streams[i].device_type());
    used.record(gather_.streams[i]);
    used.block(gather_.streams[0]);
  }
  if (state_ == State::Gathered) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].whole.numel() > 0 && has_shell(*this, i)) release(parameters_[i].whole);
    }
  }
  gather_.memory.reset();
  if (device_.is_cuda()) {
    gather_.lent.end_behind(gather_.work);
    gather_.inputs_lent.end_behind(gather_.work);
  }
  gather_.work = {};
  state_ = State::Sharded;
}

void Unit::give_values(std::size_t place, const at::Tensor& whole) {
  const c10::AutoGradMode no_grad(false);
  require_shell(*this, place);
  const UnitParameter& parameter = parameters_[place];
  const bool is_pinned = options_.offload && whole.is_cuda();
  const at::Tensor mine = shard_like(rows_of_whole(place, whole), is_pinned);
  put_into(parameter.shard(), mine.storage(), parameter.dtype);
  const at::ScalarType dtype = parameter.whole.scalar_type();
  const std::size_t bytes = storage_bytes(parameter.whole, dtype);
  put_into(parameter.whole, storage_without_memory(parameter.whole, bytes, whole.device()), dtype);
  rename(place, parameter.name);  // sets the error of access
  device_ = whole.device();
}

void Unit::start_hold() {
  if (is_held()) return;
  free();  // a shard may have changed since it was gathered
  start_gather();
}

void Unit::hold() {
  finish_gather();
  offload->wait_until_read();  // the program may write to the shards afterwards
  ++holders_;
}

at::Tensor Unit::gathered(std::size_t place, const at::Tensor& rows) const {
  const c10::AutoGradMode no_grad(false);
  const UnitParameter& parameter = parameters_[place];
  at::Tensor whole = at::empty_strided(
      parameter.sizes, parameter.strides,
      rows.options().requires_grad(false).device(offloads() ? device_ : rows.device()));
  if (whole.numel() == 0) return whole.to(rows.device());
  // An element more, since a rank may have no rows and its tensor then no memory.
  at::Tensor mine = at::empty({rows.numel() + 1}, whole.options());
  mine.as_strided(rows.sizes(), whole.strides()).copy_(rows);
  std::vector<group::SpreadRows> spread = {spread_rows(group(), parameter, mine, bytes_of(whole))};
  const group::CalledBy by(called_by);
  group::all_gather_rows(group(), std::move(spread), {whole, std::move(mine)},
                         "values of parameter '" + parameter.name + "'", {0, number_})
      .wait();
  return whole.to(rows.device());
}

at::Tensor Unit::rows_of_whole(std::size_t place, const at::Tensor& whole) const {
  const UnitParameter& parameter = parameters_[place];
  if (parameter.is_scalar) return whole;
  const Rows rows = parameter.rows(group().rank(), group().size());
  return whole.narrow(0, rows.first, rows.count);
}

std::vector<at::Tensor> Unit::whole_values() const {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const UnitParameter& parameter = parameters_[i];
    const at::TensorOptions options = at::TensorOptions(parameter.dtype).device(device_);
    if (parameter.whole.scalar_type() != parameter.dtype) {
      values.push_back(gathered(i, parameter.shard().detach()).to(device_));
    } else {
      values.push_back(at::empty({0}, options)
                           .set_(parameter.whole.storage(), 0, parameter.sizes, parameter.strides));
    }
  }
  return values;
}

void Unit::let_go() {
  note_stream();  // of what has read the whole parameters
  if (--holders_ == 0) free();
}

void Unit::note_stream() {
  if (device_.is_cpu()) return;
  const c10::Stream stream = tensor::CudaDevices::current_stream(device_);
  if (std::ranges::find(gather_.streams, stream) == gather_.streams.end())
    gather_.streams.push_back(stream);
}

at::Tensor transient(const Unit& unit, std::int64_t elements, at::ScalarType dtype) {
  const at::TensorOptions options = at::TensorOptions(dtype).device(unit.device());
  if (!unit.device().is_cpu() || elements == 0) return at::empty({elements}, options);
  const std::size_t bytes = static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, unit.pool->allocate(bytes),
                             /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, options).set_(storage, 0, {elements}, {1});
}

}  // namespace weft::shard
