// SPDX-License-Identifier: Apache-2.0
// A unit of a sharded model: parameters that are gathered together, and whose gradients are reduced
// together. Between uses each rank has only its own rows of them, as leaves that stand in the
// modules' parameters() in place of the whole ones.
//
// The shards own their unit together with the sharded model; the whole parameters, which the
// modules' members hold, refer to it weakly. The model's mutex guards it. start_gather() and free()
// do not block; finish_gather() makes the host (CPU) or the current stream (CUDA) wait.
//
// It has 27 functions, because ten of them only read what the unit was made of, and all others
// change one state: which memory the parameters have.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <weft/engine/group/process_group.h>
#include <weft/engine/shard/fully_shard_options.h>
#include <weft/engine/shard/loan.h>
#include <weft/engine/shard/model_ranks.h>
#include <weft/engine/shard/offload.h>
#include <weft/engine/shard/rows.h>
#include <weft/engine/tensor/receive_pool.h>

namespace weft::shard {

class ShardedModel;

struct UnitParameter {
  // The rows of a rank. A scalar has no rows: every rank keeps it, and rank 0's counts.
  Rows rows(int rank, int ranks) const {
    if (is_scalar) return {0, 1};
    return rows_of(sizes.front(), rank, ranks);
  }
  // The leaf in the module's parameters(). Throws Caller if the program has replaced it.
  at::Tensor shard() const;
  // The shape of `rows` rows.
  std::vector<std::int64_t> shape(std::int64_t rows) const;

  std::string name;
  at::Tensor whole;  // a shell (libtorch_internals.h)
  // The place of the shard: its module, and its key there. A reference to the shard itself, even a
  // weak one, would keep the unit alive, which the shard owns: an object of libtorch keeps what it
  // owns until it has no weak references either.
  std::weak_ptr<torch::nn::Module> module;
  std::string key;
  bool is_scalar = false;
  std::vector<std::int64_t> sizes, strides;  // of the whole
  std::int64_t row_elements = 1;
  at::ScalarType dtype = at::kFloat;  // of the shard
  std::size_t offset = 0;             // in the unit's gathered memory, in bytes
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  struct Given {
    std::string name;
    at::Tensor tensor;  // whole, the same values on all ranks
    std::shared_ptr<torch::nn::Module> module;
    std::string key;  // among the module's parameters
  };
  // Keeps this rank's rows of the parameters and turns the given tensors into shells. `number`: of
  // the unit in its group, the same on all ranks. The caller puts the shards in their places.
  static std::shared_ptr<Unit> make(std::string name, std::uint32_t number,
                                    const std::vector<Given>& given, ModelRanks ranks,
                                    const FullyShardOptions& options,
                                    std::vector<at::Tensor>& shards);

  const std::string& name() const { return name_; }
  const ModelRanks& ranks() const { return ranks_; }
  // The ranks that have the other rows.
  const ProcessGroup& group() const { return ranks_.shards; }
  const FullyShardOptions& options() const { return options_; }
  const std::vector<UnitParameter>& parameters() const { return parameters_; }
  // The device on which the unit computes.
  c10::Device device() const { return device_; }
  // True if the shards are in pinned host memory, and the unit computes on a GPU.
  bool offloads() const { return options_.offload && device_.is_cuda(); }
  std::uint32_t number() const { return number_; }
  // The parameter's name in the whole model, for errors. While the unit is sharded.
  void rename(std::size_t place, const std::string& name);

  // Errors, the flight recorder and the timeline show the unit's operations by this name
  // (group::CalledBy): "FullyShardedDataParallel's unit 'block'".
  const char* const called_by;
  std::weak_ptr<ShardedModel> model;
  std::size_t index = 0;              // in the model
  std::shared_ptr<ReceivePool> pool;  // of memory on the host; the model's
  std::shared_ptr<Offload> offload;   // the model's
  int divisor = 0;                    // of gradients; 0: the number of ranks

  // The shards, by parameter. Throws Caller if one has no values yet, or is not what it was: moved,
  // cast, resized, or dropped; or if the program has given a module's member other memory.
  std::vector<at::Tensor> shards() const;

  enum class State { Sharded, Gathering, Gathered };
  State state() const { return state_; }
  void start_gather();
  void finish_gather();
  // Frees the gathered memory, or forgets a gather under way.
  void free();
  // CUDA: notes that the current stream uses the gathered memory.
  void note_stream();
  // Bytes of the gathered memory.
  std::size_t bytes() const { return bytes_; }

  // Gives a parameter that was built on meta its values, whole, in its own dtype: this rank keeps
  // its rows of them. The parameter moves to their device.
  void give_values(std::size_t place, const at::Tensor& whole);

  // While it is held (by FullParameters), the parameters stay gathered and may be used anywhere.
  // start_hold() starts to gather the values that the shards have now, hold() waits for them.
  void start_hold();
  void hold();
  void let_go();
  bool is_held() const { return holders_ > 0; }
  // Collective; blocks. The whole of a tensor that lies like the parameter's shard, such as its
  // optimizer state; of a scalar rank 0's.
  at::Tensor gathered(std::size_t place, const at::Tensor& rows) const;
  // The reverse: this rank's rows.
  at::Tensor rows_of_whole(std::size_t place, const at::Tensor& whole) const;
  // While it is held: the whole parameters in their own dtype, as leaves. They share memory with
  // the gathered ones unless these have another dtype, in which case the call is collective.
  std::vector<at::Tensor> whole_values() const;

 private:
  Unit(std::string name, std::uint32_t number, ModelRanks ranks, const FullyShardOptions& options);
  at::Tensor add(const Given& given, std::size_t place);

  const std::string name_;
  const std::uint32_t number_;
  const ModelRanks ranks_;
  const FullyShardOptions options_;
  std::vector<UnitParameter> parameters_;
  c10::Device device_ = c10::Device(c10::kCPU);
  std::size_t bytes_ = 0;
  State state_ = State::Sharded;
  std::atomic<int> holders_{0};
  struct Gather {
    at::Tensor memory = {};  // until the parameters are filled with it
    Work work = {};          // until it has been waited for
    // CUDA: `memory` while the unit is gathered, and copies of the shards while the gather runs.
    Loan lent = {}, inputs_lent = {};
    std::vector<c10::Stream> streams = {};  // CUDA: that use it; the first one allocated `memory`
  } gather_;
};

// Sums the versions of a unit's shards: it changes when the program changes a shard.
std::uint64_t version_of(const std::vector<at::Tensor>& shards);

// Memory for a gather or a reduction of the unit, not cleared. On the host it goes back to the
// system or the pool at once: malloc would keep it.
at::Tensor transient(const Unit& unit, std::int64_t elements, at::ScalarType dtype);

}  // namespace weft::shard
