// SPDX-License-Identifier: Apache-2.0
// Collectives in two levels. Most are made of stages, each of which is a collective of another
// kind among the ranks of one host, or among ranks of different hosts (algorithms.cc writes its
// steps). Only the data that a host does not have crosses the network: of an all_reduce over h
// hosts, each host sends and receives 2 (h - 1) / h of the bytes, as in a ring of hosts.
//
// Chunks begin in order, and at most kChunksUnderWay are under way (the `turn` of a stage). So a
// message that a rank cannot receive yet never holds up one that it waits for: all messages of
// earlier chunks have been sent on that connection before, or do not depend on the waiting one.
#pragma once

#include <array>

#include <weft/transport/mesh/algorithms.h>

namespace weft::transport::mesh {

// One rank's view of a collective in two levels, and how it adds stages to its plan.
class Levels {
 public:
  using Index = Plan::Index;

  Levels(Plan& plan, const Job& job, Scratch& scratch)
      : plan_(plan),
        job_(job),
        layout_(*job.layout),
        scratch_(scratch),
        host_(layout_.host_of(job.rank)),
        place_(layout_.place_of(job.rank)),
        mates_(layout_.ranks_on(host_)),
        widens_(reduces(job.call.kind) && plan.arithmetic.wide),
        ratio_(widens_ ? sizeof(float) / size_of(job.call.dtype) : 1) {}

 protected:
  // Chunks of the stages' own algorithms: each stage takes its memory as one.
  static constexpr std::size_t kWhole = std::size_t{1} << 62;
  // More than kWindow: a chunk spends longer on its way over the network and waiting for its turn
  // on the hosts' processors than the network needs to send it. Measured: `./dev bench hosts`.
  static constexpr std::size_t kChunksUnderWay = 8;

  static std::byte* address(const Slice& slice) { return static_cast<std::byte*>(slice.data); }
  static Slice slice_at(std::byte* data, std::size_t bytes) {
    return {data, bytes, Device::host()};
  }

  bool is_alone() const { return mates_.size() == 1; }
  int members() const { return static_cast<int>(mates_.size()); }
  int root_host() const { return layout_.host_of(job_.call.root); }

  // A job among the ranks of this host.
  Job on_host(Kind kind) const { return among(kind, place_, members()); }
  // A job among ranks of different hosts, one of each.
  Job between_hosts(Kind kind) const { return among(kind, host_, layout_.hosts()); }
  Job among(Kind kind, int place, int count) const {
    Job job{.call = job_.call, .rank = place, .ranks = count};
    job.call.kind = kind;
    job.averaged = 1;
    return job;
  }
  // Adds a stage. Returns the step after which its results may be read.
  Index add(std::span<const int> members, const Job& job, const Choice& choice, Index ready,
            Index turn) {
    plan_.begin({members, ready, turn});
    const Index first = plan_.next();
    append(plan_, job, choice, scratch_);
    const Index done = plan_.all_since(first, ready, /*with_sends=*/false);
    plan_.begin({});
    return done;
  }

  // Memory for a partial result of these numbers: fp32 where they are reduced in it.
  Slice partial_of(const Slice& numbers) {
    const std::size_t bytes = numbers.bytes * ratio_;
    return slice_at(plan_.scratch(bytes, scratch_), bytes);
  }
  Precision first() const { return widens_ ? Precision::Widens : Precision::Whole; }
  Precision last() const { return widens_ ? Precision::Narrows : Precision::Whole; }
  // Gives the numbers of a rank that is alone on its host as fp32.
  Index widen(const Slice& numbers, const Slice& to) {
    return plan_.convert({.own = address(numbers),
                          .out = address(to),
                          .bytes = numbers.bytes,
                          .others = 0,
                          .precision = Precision::Widens});
  }

  // Calls function(rank) for the other ranks of this host, first for the next one.
  template <class Function>
  void for_each_mate_in_turn(const Function& function) const {
    for (int step = 1; step < members(); ++step)
      function(mates_[static_cast<std::size_t>((place_ + step) % members())]);
  }
  // Calls function(k, turn) for so many chunks.
  template <class Function>
  void in_turn(std::size_t chunks, const Function& function);

  Plan& plan_;
  const Job& job_;
  const Layout& layout_;
  Scratch& scratch_;
  const int host_;
  const int place_;
  const std::vector<int>& mates_;  // the ranks of this host
  const bool widens_;              // partial results are fp32
  const std::size_t ratio_;        // of the bytes of a partial result to those of the numbers
};

template <class Function>
void Levels::in_turn(std::size_t chunks, const Function& function) {
  std::array<Index, kChunksUnderWay> ends;
  ends.fill(Plan::kNone);
  Index turn = Plan::kNone;
  for (std::size_t k = 0; k < chunks; ++k) {
    // A step releases those that wait for it in the reverse order, so this chunk's sends before the
    // turn of the next.
    const Index before = ends[(k + 1) % kChunksUnderWay];
    const Index next = before == Plan::kNone ? turn : plan_.both(turn, before);
    const Index first = plan_.next();
    function(k, turn);
    ends[k % kChunksUnderWay] = plan_.all_since(first, turn, /*with_sends=*/true);
    turn = next;
  }
}

// Collectives in which one rank leads each host: all_reduce, broadcast, reduce, barrier.
void append_by_leaders(Plan& plan, const Job& job, Scratch& scratch);
// An all_to_all that has parts of one size on all ranks. Parts of different sizes need one level,
// because a leader could not tell how many bytes another host sends.
void append_exchange(Plan& plan, const Job& job, Scratch& scratch);
// Collectives of one memory in which each rank leads for its slice: all_reduce, broadcast, reduce.
void append_in_slices(Plan& plan, const Job& job, std::size_t chunk_bytes, Scratch& scratch);
// Collectives in which each rank has its own part: all_gather, reduce_scatter.
void append_in_parts(Plan& plan, const Job& job, std::size_t chunk_bytes, Scratch& scratch);

}  // namespace weft::transport::mesh
