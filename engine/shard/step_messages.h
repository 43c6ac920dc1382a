// SPDX-License-Identifier: Apache-2.0
// The messages of weft::join of a sharded model: the lowest rank that has inputs tells the ranks
// that have run out, by one message each, what it does next in its step.
//
// JoinedSteps owns the StepMessages. tell() does not block, receive() does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <weft/engine/group/process_group.h>

namespace weft::shard {

// Numbers of one length: a kind, the number of a unit or an optimizer, three sets of parameters of
// the unit, and doubles.
class StepMessage {
 public:
  enum Kind : std::int64_t {
    Gather,  // the unit's parameters
    Reduce,  // the gradients of the unit's parameters in Trained
    Clear,   // the unit's shards have no gradients, or zeros: None and Zeros
    Zero,    // the optimizer has zeroed its gradients before its step
    Sum,     // a tensor of that many elements is added up; doubles: its dtype, which group
    Clip,    // doubles: the greatest norm, the kind of norm
    Step,    // of the optimizer; doubles: its learning rates
    End,     // of the step
  };
  // None and Zeros are also those of Reduce. A parameter in both has a stand-in: no_sync() has kept
  // its gradient.
  enum Set : std::size_t { Trained, None, Zeros };
  // The greatest number of parameters of a unit, and of doubles.
  struct Sizes {
    std::size_t parameters = 0, doubles = 2;
  };

  StepMessage(Sizes sizes, Kind kind, std::size_t which = 0);
  StepMessage(Sizes sizes, std::vector<std::int64_t> numbers);

  std::int64_t kind() const { return numbers_[0]; }
  std::size_t which() const { return static_cast<std::size_t>(numbers_[1]); }
  bool has(Set set, std::size_t parameter) const;
  void add(Set set, std::size_t parameter);
  std::vector<double> doubles() const;
  void set_doubles(const std::vector<double>& values);

  const std::vector<std::int64_t>& numbers() const { return numbers_; }

 private:
  std::size_t word_of(Set set, std::size_t parameter) const;
  std::size_t words() const { return (sizes_.parameters + 63) / 64; }  // of a set

  Sizes sizes_;
  std::vector<std::int64_t> numbers_;
};

class StepMessages {
 public:
  StepMessages(ProcessGroup group, StepMessage::Sizes sizes)
      : group_(std::move(group)), sizes_(sizes) {}

  StepMessage made(StepMessage::Kind kind, std::size_t which = 0) const {
    return {sizes_, kind, which};
  }
  // The ranks that this rank tells from now on.
  void set_readers(std::vector<int> ranks) { readers_ = std::move(ranks); }
  bool has_readers() const { return !readers_.empty(); }
  void tell(const StepMessage& message) const;
  // Blocks until the rank has told what it does next.
  StepMessage receive(int leader) const;

 private:
  const ProcessGroup group_;
  const StepMessage::Sizes sizes_;
  std::vector<int> readers_;
};

}  // namespace weft::shard
