// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include <c10/core/GradMode.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/ddp/power_sgd.h>
#include <weft/engine/ddp/power_sgd_bucket.h>

namespace weft::comm_hooks {

namespace {

using parallel::PowerSgdBucket;

void check(const PowerSgdOptions& options) {
  const auto refuse = [](const std::string& what) {
    throw Error(Blame::Caller, "power_sgd: " + what);
  };
  if (options.matrix_approximation_rank < 1)
    refuse("matrix_approximation_rank is " + std::to_string(options.matrix_approximation_rank) +
           "; it must be at least 1");
  const bool remembers = options.use_error_feedback || options.warm_start;
  if (options.start_power_sgd_iter < (remembers ? 2 : 0))
    refuse("start_power_sgd_iter is " + std::to_string(options.start_power_sgd_iter) +
           "; with use_error_feedback or warm_start it must be at least 2, since the buckets "
           "change after the first pass, and otherwise at least 0");
  if (std::isnan(options.min_compression_rate) || options.min_compression_rate < 0)
    refuse("min_compression_rate is " + std::to_string(options.min_compression_rate) +
           "; it must be at least 0");
  if (!std::isfinite(options.orthogonalization_epsilon) || options.orthogonalization_epsilon < 0)
    refuse("orthogonalization_epsilon is " + std::to_string(options.orthogonalization_epsilon) +
           "; it must be finite and at least 0");
}

// Draws the seeds that numpy.random.RandomState(random_seed).randint(1_000_000_000) gives, which
// PyTorch's hook uses.
class Seeds {
 public:
  explicit Seeds(std::uint32_t seed) : words_(seed) {}
  std::uint64_t next() {
    constexpr std::uint32_t kMost = 1'000'000'000 - 1, kMask = (1U << 30) - 1;
    for (;;) {
      const auto word = static_cast<std::uint32_t>(words_()) & kMask;
      if (word <= kMost) return word;
    }
  }

 private:
  std::mt19937 words_;
};

// Shared by the calls of one hook and their continuations.
class PowerSgd {
 public:
  PowerSgd(ProcessGroup group, const PowerSgdOptions& options)
      : plain_(all_reduce(group)),
        group_(std::move(group)),
        options_(options),
        seeds_(options.random_seed) {}

  Future<at::Tensor> reduce(GradBucket& bucket) {
    const MutexLock lock(mutex_);
    const int pass = pass_;
    if (bucket.is_last()) ++pass_;
    const at::Tensor& buffer = bucket.buffer();
    const bool is_matrix = buffer.layout() == at::kStrided && buffer.is_floating_point();
    if (pass < options_.start_power_sgd_iter || !is_matrix) return plain_(bucket);
    return compressed(bucket);
  }

 private:
  // A group, and one of the same ranks for what is issued on other threads than backward's, where
  // no order with backward's collectives is given.
  struct Groups {
    ProcessGroup own, later;
    Future<Work> last;  // the last operation that was issued in `later`
  };

  Groups& groups_for(const GradBucket& bucket) WEFT_REQUIRES(mutex_) {
    const auto device = bucket.buffer().device();
    const bool elsewhere = device.is_cuda() && group_.device().is_cuda() &&
                           device != group_.device() && bucket.group();
    Groups& groups = groups_[elsewhere ? device.index() : c10::DeviceIndex(-1)];
    if (!groups.own) {
      groups.own = elsewhere ? bucket.group() : group_;
      std::vector<int> ranks(static_cast<std::size_t>(groups.own.size()));
      std::iota(ranks.begin(), ranks.end(), 0);
      groups.later = groups.own.new_group(std::move(ranks));
      groups.last = Future<Work>::ready(Work());
    }
    return groups;
  }

  Future<at::Tensor> compressed(GradBucket& bucket) WEFT_REQUIRES(mutex_) {
    const c10::NoGradGuard no_grad;
    Groups& groups = groups_for(bucket);
    std::shared_ptr<PowerSgdBucket>& memory = buckets_[bucket.index()];
    if (!memory || !memory->fits(bucket))
      memory = std::make_shared<PowerSgdBucket>(bucket, options_);
    const at::Tensor buffer = bucket.buffer();
    memory->begin(buffer, [this]() WEFT_UNCHECKED_LOCKING { return seeds_.next(); });

    Work rest =
        memory->uncompressed().defined() ? groups.own.all_reduce(memory->uncompressed()) : Work();
    const int ranks = groups.own.size();
    if (!memory->ps().defined()) {
      return rest.future().then([memory, buffer, ranks] {
        const c10::NoGradGuard untracked;
        memory->finish(ranks);
        return buffer;
      });
    }
    const Future<void> ps = groups.own.all_reduce(memory->ps()).future();
    // In the order of the buckets, which is the same on all ranks. An error of an earlier bucket is
    // that bucket's.
    groups.last = groups.last.then([ps](const Future<Work>&) { return ps; })
                      .then([memory, later = groups.later]() mutable {
                        const c10::NoGradGuard untracked;
                        memory->compute_qs();
                        return later.all_reduce(memory->qs());
                      });
    return groups.last.then([](const Work& qs) { return Work(qs).future(); })
        .then([rest = rest.future()] { return rest; })
        .then([memory, buffer, ranks] {
          const c10::NoGradGuard untracked;
          memory->finish(ranks);
          return buffer;
        });
  }

  const CommHook plain_;
  const ProcessGroup group_;
  const PowerSgdOptions options_;
  Mutex mutex_;
  int pass_ WEFT_GUARDED_BY(mutex_) = 0;  // how many passes have launched all their buckets
  Seeds seeds_ WEFT_GUARDED_BY(mutex_);
  std::map<c10::DeviceIndex, Groups> groups_ WEFT_GUARDED_BY(mutex_);
  std::map<std::size_t, std::shared_ptr<PowerSgdBucket>> buckets_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace

CommHook power_sgd(ProcessGroup group, PowerSgdOptions options) {
  check(options);
  if (!group) throw Error(Blame::Caller, "power_sgd: the group is empty");
  return [hook = std::make_shared<PowerSgd>(std::move(group), options)](GradBucket& bucket) {
    return hook->reduce(bucket);
  };
}

}  // namespace weft::comm_hooks
