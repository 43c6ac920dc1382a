// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/shard/step_messages.h>

namespace weft::shard {

namespace {

constexpr int kTag = 31007;
constexpr std::size_t kFront = 2;  // numbers before the sets

}  // namespace

StepMessage::StepMessage(Sizes sizes, Kind kind, std::size_t which) : sizes_(sizes) {
  numbers_.resize(kFront + 3 * words() + sizes_.doubles);
  numbers_[0] = kind;
  numbers_[1] = static_cast<std::int64_t>(which);
}

StepMessage::StepMessage(Sizes sizes, std::vector<std::int64_t> numbers)
    : sizes_(sizes), numbers_(std::move(numbers)) {}

std::size_t StepMessage::word_of(Set set, std::size_t parameter) const {
  return kFront + set * words() + parameter / 64;
}

bool StepMessage::has(Set set, std::size_t parameter) const {
  const auto word = static_cast<std::uint64_t>(numbers_[word_of(set, parameter)]);
  return (word >> (parameter % 64) & 1) != 0;
}

void StepMessage::add(Set set, std::size_t parameter) {
  std::int64_t& word = numbers_[word_of(set, parameter)];
  word = static_cast<std::int64_t>(static_cast<std::uint64_t>(word) | std::uint64_t{1}
                                                                          << (parameter % 64));
}

std::vector<double> StepMessage::doubles() const {
  std::vector<double> values(sizes_.doubles);
  std::memcpy(values.data(), numbers_.data() + kFront + 3 * words(),
              values.size() * sizeof(double));
  return values;
}

void StepMessage::set_doubles(const std::vector<double>& values) {
  const std::size_t count = std::min(values.size(), sizes_.doubles);
  std::memcpy(numbers_.data() + kFront + 3 * words(), values.data(), count * sizeof(double));
}

void StepMessages::tell(const StepMessage& message) const {
  if (readers_.empty()) return;
  const c10::AutoGradMode no_grad(false);
  const std::vector<std::int64_t>& all = message.numbers();
  at::Tensor numbers =
      at::empty({static_cast<std::int64_t>(all.size())}, at::TensorOptions(at::kLong));
  std::memcpy(numbers.mutable_data_ptr(), all.data(), all.size() * sizeof(std::int64_t));
  numbers = numbers.to(group::host_values_device(group_));
  const group::CalledBy by("join");
  ProcessGroup group = group_;
  // The operation keeps the numbers, which nobody else uses.
  for (const int rank : readers_) static_cast<void>(group.send(numbers, rank, kTag));
}

StepMessage StepMessages::receive(int leader) const {
  const auto size = static_cast<std::int64_t>(made(StepMessage::End).numbers().size());
  const at::Tensor received =
      at::empty({size}, at::TensorOptions(at::kLong).device(group::host_values_device(group_)));
  const group::CalledBy by("join");
  ProcessGroup group = group_;
  group.recv(received, leader, kTag).wait();
  const at::Tensor here = received.to(at::kCPU);
  const auto* const numbers = static_cast<const std::int64_t*>(here.const_data_ptr());
  return {sizes_, std::vector<std::int64_t>(numbers, numbers + here.numel())};
}

}  // namespace weft::shard
