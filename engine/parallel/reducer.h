// Averages gradients over the ranks while the backward pass still computes the next ones. Internal to
// DistributedDataParallel: knows parameters and buckets, not modules.
//
// A pass: prepare_forward, the user's forward, prepare_backward(outputs), the user's backward. Each parameter's gradient
// accumulator calls on_gradient when its gradient is there; the last gradient of a bucket launches the bucket's all-reduce
// at once, from that thread, in the order of the buckets, which is the same on all ranks. When backward ends, finish()
// makes the current stream (CPU: this thread) wait for the sums and puts the averages into the gradients.
//
// Thread-safe against autograd's threads; forward and backward themselves come from the user one after the other.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>

#include <torch/csrc/autograd/function.h>

#include <weft/engine/group/sparse_sum.h>
#include <weft/engine/parallel/bucket.h>
#include <weft/engine/parallel/comm_hooks.h>
#include <weft/engine/parallel/ddp_options.h>
#include <weft/engine/parallel/device_groups.h>
#include <weft/engine/parallel/model_state.h>
#include <weft/engine/parallel/reducer_state.h>
#include <weft/engine/tensor/torch_releases.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

struct ReducerParameter {
  std::string name;
  at::Tensor tensor;  // a leaf that requires grad
  bool sparse_gradient = false;
};

// Goes on with the averages while backward computes the next gradients (ZeroRedundancyOptimizer). Owned by others.
class BucketFollower {
 public:
  BucketFollower() = default;
  BucketFollower(const BucketFollower&) = delete;
  BucketFollower& operator=(const BucketFollower&) = delete;
  virtual ~BucketFollower() = default;
  // Before a forward with gradients that follows a backward which has ended.
  virtual void before_forward() = 0;
  // Of every bucket, in their order, on the thread of backward, when its collective has been issued: what it issues itself
  // has the same place among the group's operations on all ranks. The averages are in the gradients of `parameters` when
  // `averaged` is done (CUDA: for streams that wait for it). A bucket of a sparse gradient shows no parameters.
  virtual void on_bucket(const std::vector<at::Tensor>& parameters, const Future<void>& averaged, bool is_last) = 0;
  // The backward ends with an error: throws that, or an earlier one of its own, which has brought it about. Once it has
  // begun to follow this pass, the other ranks are told.
  [[noreturn]] virtual void fail(const std::exception_ptr& why) = 0;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  static std::shared_ptr<Reducer> make(std::vector<ReducerParameter> parameters, DeviceGroups groups,
                                       const DdpOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before every forward with gradients, also one whose backward will not synchronise.
  void begin_forward();
  // Before a forward whose backward will synchronise. Rebuilds the buckets once, after the first synchronised backward.
  // Throws Caller when the last backward left gradients out, or module->to() came meanwhile, naming the parameters.
  void prepare_forward();
  // After that forward; `outputs` are what it returned.
  void prepare_backward(const std::vector<at::Tensor>& outputs);
  // Called when the backward of that forward starts, where DistributedDataParallel can tell: before any gradient, and even
  // when none comes.
  void on_backward_start();
  void set_comm_hook(CommHook hook);
  // Null for none. Not during a backward.
  void set_follower(BucketFollower* follower);
  bool has_follower() const;
  // What gradients are divided by; the number of ranks unless join says otherwise.
  void set_divisor(int ranks);
  // Takes part in one pass of the others with zeros: what a rank does that has run out of inputs. Its parameters receive
  // the gradients that the others' do, for an optimizer that goes on here (ZeroRedundancyOptimizer).
  void mirror_pass();

  DdpStats stats() const;
  const std::vector<ReducerParameter>& parameters() const { return parameters_; }
  const ProcessGroup& group() const { return groups_.own(); }

 private:
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::size_t limit = 0;
    bool sparse = false;
    at::Tensor flat;
    std::vector<at::Tensor> views;  // of flat, shaped and strided as the parameters
    std::size_t pending = 0;
    std::vector<c10::Stream> streams;      // CUDA: on which this pass has filled slots
    Future<at::Tensor> reduced;            // what the hook returned
    Work work;                             // the built-in all-reduce
    std::optional<Future<void>> averaged;  // the gradients, by who brings one of the two; with a follower
    at::Tensor sparse_gradient;
    group::SparseSum sparse_sum;
    std::vector<trace::Arrow> arrows;  // from the gradients that have come
  };
  struct Place {
    std::size_t bucket = 0;
    std::size_t slot = 0;
  };

  Reducer(std::vector<ReducerParameter> parameters, DeviceGroups groups, const DdpOptions& options);
  void attach();
  void build_buckets(const std::vector<std::size_t>& order);
  void take_over_order();

  static at::Tensor& gradient_of(const at::Tensor& parameter);
  bool gradients_are_views() const;
  bool accumulates() const;
  void on_gradient(std::size_t parameter);
  void begin_pass();
  void mark_unused();
  void mark_ready(std::size_t parameter);
  void fill_slot(Bucket& bucket, std::size_t slot, std::size_t parameter);
  void note_stream(Bucket& bucket, const c10::Device& device);
  void wait_for_slots(Bucket& bucket);
  void launch_ready_buckets();
  void launch(std::size_t index);
  void launch_sparse(Bucket& bucket);
  void follow(std::size_t index);
  bool is_used_anywhere(std::size_t parameter);
  bool counts_usage() const;
  bool rebuilds() const { return static_graph_ || !options_.find_unused_parameters; }
  void drop_failed_pass();
  void note_failure(std::string why);
  Error failed_pass() const;
  Future<at::Tensor> call_hook(GradBucket& bucket);
  void require_in_step() const;
  void require_same_pass() const;
  void require_same_parameters() const;
  void refuse_capture() const;
  void wait(Work work, const c10::Device& device) const;
  void queue_finish();
  void at_end_of_backward(void (*call)(Reducer&));
  void finish();
  void collect(Bucket& bucket);
  void collect_sparse(Bucket& bucket);
  bool finds_unused() const;
  void leave_out_what_is_missing();
  void restore_unused();
  std::vector<std::size_t> missing_parameters() const;
  std::string names_of(const std::vector<std::size_t>& parameters) const;
  std::vector<std::size_t> unreachable_from(const std::vector<at::Tensor>& outputs) const;
  void check_static_graph(std::size_t parameter);
  void require_used_by_others();

  const std::vector<ReducerParameter> parameters_;
  DeviceGroups groups_;  // of the buckets; its own one of everything else
  const DdpOptions options_;
  int divisor_;

  mutable std::mutex mutex_;  // of all below
  std::vector<NodePtr<torch::autograd::Node>> accumulators_;
  std::vector<std::uintptr_t> hook_keys_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;
  CommHook hook_;
  BucketFollower* follower_ = nullptr;

  bool expecting_ = false;                                // a forward said that its backward will synchronise
  bool passing_ = false;                                  // a gradient of this pass has come
  std::shared_ptr<const std::atomic<bool>> pass_failed_;  // that of an AutogradContext that this is; null for others
  std::string failure_;                                   // what ended this pass, where that is known
  bool out_of_step_ = false;                              // it failed between its buckets
  bool unused_marked_ = false;
  bool finish_queued_ = false;
  std::size_t next_bucket_ = 0;  // the first that is not launched
  std::vector<bool> ready_;
  std::vector<std::size_t> unused_;  // by this pass's outputs
  std::vector<bool> left_out_;       // counted as unused by the last pass, although the forward used them
  bool outputs_again_ = false;       // a backward runs in which the outputs of a forward take part that has had its pass
  std::vector<at::Tensor> kept_;     // gradients of unused parameters as they were, by parameter
  Usage usage_;
  StaticGraph static_graph_;
  ArrivalOrder order_;

  DdpStats stats_;
};

}  // namespace weft::parallel
