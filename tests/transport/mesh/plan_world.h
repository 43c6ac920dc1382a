// SPDX-License-Identifier: Apache-2.0
// The plans of all ranks, executed against each other in one thread and in random order.
#pragma once

#include <cstring>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include <weft/transport/mesh/algorithms.h>

namespace weft::transport::mesh {

// One rank with its memory, all of it 32-bit integers.
struct Member {
  std::vector<std::int32_t> data;
  std::vector<std::vector<std::int32_t>> inputs, outputs;
  std::vector<Slice> input_slices, output_slices;
  Plan plan;
  Scratch scratch;
};

inline Slice slice_of(std::vector<std::int32_t>& numbers) {
  return {numbers.data(), numbers.size() * 4, Device::host()};
}

// Connections of minimal capacity: a message blocks the next one until it has been received, and a
// send is done when its message has been received.
class World {
 public:
  World(int ranks, unsigned seed) : members(static_cast<std::size_t>(ranks)), random_(seed) {}
  World(const Layout& layout, int ranks, unsigned seed) : World(ranks, seed) {
    layout_ = &layout;
    crossed.resize(static_cast<std::size_t>(layout.hosts()));
    messages.resize(crossed.size());
  }

  void plan(const Call& call, const Choice& choice) {
    depths_.resize(members.size());
    for (int rank = 0; rank < ranks(); ++rank) {
      Member& member = of(rank);
      for (auto& input : member.inputs) member.input_slices.push_back(slice_of(input));
      for (auto& output : member.outputs) member.output_slices.push_back(slice_of(output));
      const Job job{.call = call,
                    .rank = rank,
                    .ranks = ranks(),
                    .data = slice_of(member.data),
                    .inputs = member.input_slices,
                    .outputs = member.output_slices,
                    .layout = layout_};
      write(member.plan, job, choice, member.scratch);
      depths_[static_cast<std::size_t>(rank)].assign(member.plan.steps().size(), 0);
    }
  }

  // Runs until no step can run any more.
  void run() {
    for (int rank = 0; rank < ranks(); ++rank) {
      std::vector<Plan::Index> first;
      for (Plan::Index i = 0; i < of(rank).plan.steps().size(); ++i) {
        if (of(rank).plan.steps()[i].waits_for == 0) first.push_back(i);
      }
      for (const Plan::Index i : first) release(rank, i);
    }
    for (auto turns = turns_that_can(); !turns.empty(); turns = turns_that_can()) {
      const auto [from, to] = turns[random_() % turns.size()];
      take(from, to);
    }
  }

  void expect_all_done() {
    for (int rank = 0; rank < ranks(); ++rank) {
      for (const Plan::Step& step : of(rank).plan.steps()) {
        ASSERT_EQ(step.state, Plan::State::Done)
            << "rank " << rank << " step with rank " << step.peer << " number " << step.number;
      }
    }
  }

  int ranks() const { return static_cast<int>(members.size()); }
  Member& of(int rank) { return members[static_cast<std::size_t>(rank)]; }
  std::vector<Member> members;
  std::vector<std::size_t> crossed;   // bytes to other hosts, by host
  std::vector<std::size_t> messages;  // to other hosts, by host
  int trips = 0;  // most messages between hosts, each of which waited for another

 private:
  void release(int rank, Plan::Index index) {
    Plan::Step& step = of(rank).plan.steps()[index];
    if (step.action == Plan::Action::Send) {
      step.state = Plan::State::Started;
      queues_[{rank, step.peer}].push_back(index);
    } else if (step.action == Plan::Action::Copy) {
      if (step.bytes > 0) std::memmove(step.data, step.from, step.bytes);
      if (step.fold != Plan::kNone) {
        Plan& plan = of(rank).plan;
        plan.folds()[step.fold].add_none(plan.arithmetic, of(rank).scratch);
      }
      done(rank, index);
    }
  }

  void done(int rank, Plan::Index index) {
    Plan& plan = of(rank).plan;
    plan.steps()[index].state = Plan::State::Done;
    for (Plan::Index link = plan.steps()[index].first_link; link != Plan::kNone;
         link = plan.links()[link].next) {
      const Plan::Index later = plan.links()[link].step;
      depth_of(rank, later) = std::max(depth_of(rank, later), depth_of(rank, index));
      if (--plan.steps()[later].waits_for == 0) release(rank, later);
    }
  }

  std::vector<std::pair<int, int>> turns_that_can() {
    std::vector<std::pair<int, int>> turns;
    for (auto& [link, queue] : queues_) {
      if (queue.empty()) continue;
      const Plan::Step& sent = of(link.first).plan.steps()[queue.front()];
      Plan::Step* const expected = of(link.second).plan.expected(link.first, sent.number);
      if (expected == nullptr || expected->state != Plan::State::Waiting ||
          expected->bytes != sent.bytes) {
        ADD_FAILURE() << "rank " << link.second << " does not expect part " << sent.number << " of "
                      << sent.bytes << " bytes from rank " << link.first;
        return {};
      }
      if (expected->waits_for == 0) turns.push_back(link);
    }
    return turns;
  }

  void take(int from, int to) {
    auto& queue = queues_[{from, to}];
    const Plan::Index index = queue.front();
    queue.erase(queue.begin());
    const Plan::Step& source = of(from).plan.steps()[index];
    const bool crosses = layout_ != nullptr && layout_->host_of(from) != layout_->host_of(to);
    if (crosses) {
      crossed[static_cast<std::size_t>(layout_->host_of(from))] += source.bytes;
      ++messages[static_cast<std::size_t>(layout_->host_of(from))];
    }
    Plan& plan = of(to).plan;
    Plan::Step& target = *plan.expected(from, source.number);
    int& depth = depth_of(to, plan.index_of(target));
    depth = std::max(depth, depth_of(from, index) + (crosses ? 1 : 0));
    trips = std::max(trips, depth);
    if (target.action == Plan::Action::Fold) {
      plan.folds()[target.fold].add(source.data, plan.arithmetic, of(to).scratch);
    } else if (target.bytes > 0) {
      std::memcpy(target.data, source.data, target.bytes);
    }
    done(from, index);
    done(to, plan.index_of(target));
  }

  std::map<std::pair<int, int>, std::vector<Plan::Index>> queues_;
  // Number of messages between hosts that a step has waited for, one after the other.
  int& depth_of(int rank, Plan::Index step) {
    return depths_[static_cast<std::size_t>(rank)][step];
  }

  std::vector<std::vector<int>> depths_;  // by rank and step
  std::mt19937 random_;
  const Layout* layout_ = nullptr;
};

inline std::int32_t number(int rank, std::size_t index) {
  return 1000 * (rank + 1) + static_cast<std::int32_t>(index % 997);
}

inline std::vector<std::int32_t> numbers_of(int rank, std::size_t count, std::size_t first = 0) {
  std::vector<std::int32_t> numbers(count);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = number(rank, first + i);
  return numbers;
}

inline std::vector<std::int32_t> sum_of(int ranks, std::size_t count, std::size_t first = 0) {
  std::vector<std::int32_t> sum(count, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += number(rank, first + i);
  }
  return sum;
}

inline Call call_of(Kind kind, std::size_t count, int root = 0) {
  return {
      .kind = kind, .dtype = Dtype::Int32, .op = ReduceOp::Sum, .root = root, .bytes = count * 4};
}

}  // namespace weft::transport::mesh
