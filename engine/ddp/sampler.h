// SPDX-License-Identifier: Apache-2.0
// Deals the examples of a data set out to ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/data/samplers/base.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// Options of DistributedSampler, the same on all ranks.
struct SamplerOptions {
  // Shuffle the examples anew in every epoch.
  bool shuffle = true;
  // The seed of the shuffling.
  std::uint64_t seed = 0;
  // Leave out the last examples that do not suffice for all ranks; otherwise the first examples are
  // repeated for the remaining ranks.
  bool drop_last = false;
};

// Deals the examples 0 … dataset_size - 1 out to the ranks, equally many to each: rank r takes
// positions r, r + size, … of the epoch's order. That order is the one of
// torch.utils.data.DistributedSampler for the same seed and epoch. It is a libtorch sampler: pass
// it to torch::data::make_data_loader, or use indices().
class WEFT_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // Throws Caller if `rank` is not below `ranks`.
  DistributedSampler(std::size_t dataset_size, std::size_t ranks, std::size_t rank,
                     SamplerOptions options = {});
  // Deals to the ranks of a group, on each of which it is constructed.
  DistributedSampler(std::size_t dataset_size, const ProcessGroup& group,
                     SamplerOptions options = {});

  // A move copies too: a sampler that was moved into a data loader still chooses its epochs.
  DistributedSampler(const DistributedSampler&) = default;
  // The same.
  DistributedSampler& operator=(const DistributedSampler&) = default;

  // Chooses the order of that epoch; all ranks give the same epoch. Takes effect at once here, and
  // in copies at their next reset(): a data loader resets its copy at the begin of its epoch.
  void set_epoch(std::size_t epoch);
  // This rank's examples in this epoch, in order.
  const std::vector<std::int64_t>& indices() const { return indices_; }
  // The number of this rank's examples in an epoch.
  std::size_t size() const { return indices_.size(); }

  // libtorch's interface. reset() starts the epoch again.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  // Returns the next examples, at most `batch_size`; nullopt at the end of the epoch.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  // Writes the epoch, the position in it and the number of ranks. A sampler that has dealt nothing
  // itself writes the position of the copy that has dealt last: a data loader's. (A loader with
  // workers reads ahead, so that position is then ahead of the program.)
  void save(torch::serialize::OutputArchive& archive) const override;
  // Continues at the epoch and the position that save() has written, also in a data loader: the
  // next reset(), and set_epoch() of that epoch, keep the position. Of another number of ranks, it
  // continues behind the examples that those have taken together; up to `ranks` - 1 of them, if
  // they do not divide evenly, are taken again. Throws Caller for another archive.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void deal();

  std::size_t dataset_size_;
  std::size_t ranks_;
  std::size_t rank_;
  SamplerOptions options_;
  // Shared by all copies.
  struct Shared {
    static constexpr std::size_t kNone = ~std::size_t{0};
    std::atomic<std::size_t> epoch{0};
    std::atomic<std::size_t> position{0};    // of the copy that has dealt last
    std::atomic<std::size_t> loaded{kNone};  // where the next reset() continues
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::size_t position_ = 0;
  bool has_dealt_ = false;  // by next(), since the epoch began or was loaded
  std::vector<std::int64_t> indices_;
};

// A data set cut once, at random, into parts of given fractions: for example one for each rank, or
// one for training and one for testing.
class WEFT_API DataPartitioner {
 public:
  // Part i gets int(fractions[i] * dataset_size) examples. Throws Caller if a fraction is negative
  // or their sum exceeds 1. The same seed gives the same parts on every rank and machine.
  DataPartitioner(std::size_t dataset_size, const std::vector<double>& fractions,
                  std::uint64_t seed = 1234);

  // The examples of one part. Throws Caller if there is no such part.
  const std::vector<std::int64_t>& use(int part) const;

 private:
  std::vector<std::vector<std::int64_t>> parts_;
};

}  // namespace weft
