// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/sampler.h>

namespace weft {

DistributedSampler::DistributedSampler(std::size_t dataset_size, std::size_t ranks,
                                       std::size_t rank, SamplerOptions options)
    : dataset_size_(dataset_size), ranks_(ranks), rank_(rank), options_(options) {
  if (ranks == 0 || rank >= ranks) {
    throw Error(Blame::Caller, "DistributedSampler: rank " + std::to_string(rank) + " of " +
                                   std::to_string(ranks) +
                                   " ranks; there is at least one, and they are numbered from 0");
  }
  deal();
}

DistributedSampler::DistributedSampler(std::size_t dataset_size, const ProcessGroup& group,
                                       SamplerOptions options)
    : DistributedSampler(dataset_size, static_cast<std::size_t>(group.size()),
                         static_cast<std::size_t>(group.rank()), options) {}

void DistributedSampler::set_epoch(std::size_t epoch) {
  const bool continues = shared_->epoch.exchange(epoch) == epoch;
  if (!continues) shared_->loaded = Shared::kNone;
  deal();
  position_ = continues && shared_->loaded != Shared::kNone ? shared_->loaded.load() : 0;
  shared_->position = position_;
}

void DistributedSampler::deal() {
  position_ = 0;
  has_dealt_ = false;
  indices_.clear();
  std::vector<std::int64_t> order(dataset_size_);
  if (options_.shuffle) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed + shared_->epoch);
    const at::Tensor shuffled = at::randperm(static_cast<std::int64_t>(dataset_size_), generator);
    const auto* data = shuffled.data_ptr<std::int64_t>();
    order.assign(data, data + dataset_size_);
  } else {
    std::iota(order.begin(), order.end(), 0);
  }
  if (order.empty()) return;
  const std::size_t each =
      options_.drop_last ? dataset_size_ / ranks_ : (dataset_size_ + ranks_ - 1) / ranks_;
  indices_.reserve(each);
  for (std::size_t i = 0; i < each; ++i)
    indices_.push_back(order[(i * ranks_ + rank_) % order.size()]);
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  dataset_size_ = new_size.value_or(dataset_size_);
  deal();
  const std::size_t loaded = shared_->loaded.exchange(Shared::kNone);
  position_ = loaded == Shared::kNone ? 0 : loaded;
  shared_->position = position_;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  shared_->loaded = Shared::kNone;
  has_dealt_ = true;
  if (position_ >= indices_.size()) return std::nullopt;
  const std::size_t end = std::min(position_ + batch_size, indices_.size());
  std::vector<std::size_t> batch;
  for (; position_ < end; ++position_)
    batch.push_back(static_cast<std::size_t>(indices_[position_]));
  shared_->position = position_;
  return batch;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const std::size_t position = has_dealt_ ? position_ : shared_->position.load();
  archive.write("position", c10::IValue(static_cast<std::int64_t>(position)));
  archive.write("epoch", c10::IValue(static_cast<std::int64_t>(shared_->epoch.load())));
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(ranks_)));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto count_at = [&](const char* key) {
    c10::IValue value;
    if (!archive.try_read(key, value)) return std::optional<std::size_t>();
    if (!value.isInt() || value.toInt() < 0)
      throw Error(Blame::Caller, "DistributedSampler: the archive's '" + std::string(key) +
                                     "' is not a number of examples or epochs");
    return std::optional(static_cast<std::size_t>(value.toInt()));
  };
  const auto epoch = count_at("epoch");
  const auto position = count_at("position");
  if (!epoch || !position)
    throw Error(Blame::Caller, "DistributedSampler: the archive has no epoch and position");
  // An archive without the number of ranks is of this number.
  const std::size_t saved_ranks = count_at("ranks").value_or(ranks_);
  set_epoch(*epoch);
  position_ = saved_ranks == ranks_ ? *position : *position * saved_ranks / ranks_;
  shared_->position = position_;
  shared_->loaded = position_;
}

DataPartitioner::DataPartitioner(std::size_t dataset_size, const std::vector<double>& fractions,
                                 std::uint64_t seed) {
  double sum = 0;
  for (const double fraction : fractions) {
    if (!(fraction >= 0))
      throw Error(Blame::Caller, "DataPartitioner: the fraction " + std::to_string(fraction) +
                                     " is not a fraction; give numbers from 0 to 1");
    sum += fraction;
  }
  if (sum > 1 + 1e-9)
    throw Error(Blame::Caller, "DataPartitioner: the fractions sum to " + std::to_string(sum) +
                                   ", which is over 1");
  std::vector<std::int64_t> order(dataset_size);
  std::iota(order.begin(), order.end(), 0);
  // Fisher and Yates by hand: std::shuffle differs between standard libraries.
  std::mt19937_64 random(seed);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  std::size_t begin = 0;
  for (const double fraction : fractions) {
    const auto count =
        std::min(static_cast<std::size_t>(fraction * static_cast<double>(dataset_size)),
                 dataset_size - begin);
    parts_.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(begin),
                        order.begin() + static_cast<std::ptrdiff_t>(begin + count));
    begin += count;
  }
}

const std::vector<std::int64_t>& DataPartitioner::use(int part) const {
  if (part < 0 || part >= static_cast<int>(parts_.size())) {
    throw Error(Blame::Caller,
                "DataPartitioner: part " + std::to_string(part) + " of " +
                    std::to_string(parts_.size()) +
                    "; they are numbered from 0, one for each fraction that was given");
  }
  return parts_[static_cast<std::size_t>(part)];
}

}  // namespace weft
