// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/transport/mesh/levels.h>

namespace weft::transport::mesh {

namespace {

using Index = Plan::Index;

class Parts : Levels {
 public:
  using Levels::Levels;
  void all_gather(std::size_t chunk_bytes);
  void reduce_scatter(std::size_t chunk_bytes);

 private:
  // The rank of a host that exchanges data with the ranks of this place on other hosts.
  int counterpart(int host, int place) const {
    const auto& ranks = layout_.ranks_on(host);
    return ranks[static_cast<std::size_t>(place) % ranks.size()];
  }
  // Calls function(rank) for the ranks of other hosts whose counterpart on this host is `mate`.
  template <class Function>
  void for_each_far(int mate, const Function& function) const;
};

template <class Function>
void Parts::for_each_far(int mate, const Function& function) const {
  for (int host = 0; host < layout_.hosts(); ++host) {
    if (host == host_) continue;
    for (const int rank : layout_.ranks_on(host)) {
      if (counterpart(host_, layout_.place_of(rank)) == mate) function(rank);
    }
  }
}

// A rank sends its data to its counterpart on each other host, which hands it to the ranks there.
void Parts::all_gather(std::size_t chunk_bytes) {
  const std::size_t bytes = job_.data.bytes;
  const auto chunk_of = [&](const Slice& memory, std::size_t k) {
    const std::size_t begin = std::min(k * chunk_bytes, bytes);
    return memory.part(begin, std::min(chunk_bytes, bytes - begin));
  };
  const auto output = [&](int rank) { return job_.outputs[static_cast<std::size_t>(rank)]; };
  const std::size_t chunks = std::max<std::size_t>(1, (bytes + chunk_bytes - 1) / chunk_bytes);
  in_turn(chunks, [&](std::size_t k, Index turn) {
    plan_.begin({{}, Plan::kNone, turn});
    const auto send = [&](int peer, const Slice& memory) {
      return plan_.send(peer, address(memory), memory.bytes);
    };
    const auto receive = [&](int peer, const Slice& memory) {
      return plan_.receive(peer, address(memory), memory.bytes);
    };
    const Slice own = chunk_of(job_.data, k);
    for (int step = 1; step < layout_.hosts(); ++step)
      send(counterpart((host_ + step) % layout_.hosts(), place_), own);
    for_each_mate_in_turn([&](int mate) { send(mate, own); });
    for_each_far(job_.rank, [&](int rank) {
      const Slice memory = chunk_of(output(rank), k);
      const Index come = receive(rank, memory);
      for_each_mate_in_turn([&](int mate) { plan_.after(come, send(mate, memory)); });
    });
    for_each_mate_in_turn([&](int mate) {
      receive(mate, chunk_of(output(mate), k));
      for_each_far(mate, [&](int rank) { receive(mate, chunk_of(output(rank), k)); });
    });
  });
  plan_.begin({});
  const Slice own = output(job_.rank);
  if (own.data != job_.data.data) plan_.copy(address(own), address(job_.data), bytes);
}

// The ranks of a host reduce the part of each rank of another host at its counterpart, which sends
// it there.
void Parts::reduce_scatter(std::size_t chunk_bytes) {
  const auto part = [&](int rank) { return job_.inputs[static_cast<std::size_t>(rank)]; };
  const auto chunks_of = [&](int rank) {
    return std::max<std::size_t>(1, (part(rank).bytes + chunk_bytes - 1) / chunk_bytes);
  };
  const auto chunk_of = [&](const Slice& memory, std::size_t k) {
    const std::size_t begin = k * chunk_bytes;
    return memory.part(begin, std::min(chunk_bytes, memory.bytes - begin));
  };
  std::size_t chunks = 1;
  for (int rank = 0; rank < job_.ranks; ++rank) chunks = std::max(chunks, chunks_of(rank));
  std::vector<Slice> sums(static_cast<std::size_t>(job_.ranks));  // within this host, by rank
  const auto sum = [&](int rank) -> Slice& { return sums[static_cast<std::size_t>(rank)]; };
  const bool needs_none = is_alone() && !widens_;
  for_each_far(job_.rank,
               [&](int rank) { sum(rank) = needs_none ? part(rank) : partial_of(part(rank)); });
  sum(job_.rank) = needs_none ? part(job_.rank) : widens_ ? partial_of(job_.data) : job_.data;
  const auto chunk_of_sum = [&](int rank, std::size_t k) {
    return sum(rank).part(k * chunk_bytes * ratio_, chunk_of(part(rank), k).bytes * ratio_);
  };
  // Calls function(rank) for the ranks whose parts `mate` reduces within this host.
  const auto for_each_part_of = [&](int mate, std::size_t k, const auto& function) {
    if (k < chunks_of(mate)) function(mate);
    for_each_far(mate, [&](int rank) {
      if (k < chunks_of(rank)) function(rank);
    });
  };
  in_turn(chunks, [&](std::size_t k, Index turn) {
    plan_.begin({{}, Plan::kNone, turn});
    for_each_mate_in_turn([&](int mate) {
      for_each_part_of(mate, k, [&](int rank) {
        const Slice piece = chunk_of(part(rank), k);
        plan_.send(mate, address(piece), piece.bytes);
      });
    });
    Index own = Plan::kNone;
    for_each_part_of(job_.rank, k, [&](int rank) {
      const Slice piece = chunk_of(part(rank), k), out = chunk_of_sum(rank, k);
      Index reduced = Plan::kNone;
      if (!is_alone()) {
        const Index fold = plan_.fold({.own = address(piece),
                                       .out = address(out),
                                       .bytes = piece.bytes,
                                       .others = static_cast<std::uint32_t>(members() - 1),
                                       .precision = first()});
        for (const int mate : mates_) {
          if (mate != job_.rank) reduced = plan_.add(fold, mate);
        }
      } else if (widens_) {
        reduced = widen(piece, out);
      }
      if (rank == job_.rank) {
        own = reduced;
      } else {
        plan_.after(reduced, plan_.send(rank, address(out), out.bytes));
      }
    });
    if (k >= chunks_of(job_.rank)) return;
    const Slice mine = chunk_of_sum(job_.rank, k), out = chunk_of(job_.data, k);
    const bool averages = job_.call.op == ReduceOp::Avg;
    const Index fold = plan_.fold({.own = address(mine),
                                   .out = address(out),
                                   .bytes = mine.bytes,
                                   .others = static_cast<std::uint32_t>(layout_.hosts() - 1),
                                   .scale = averages ? 1.0 / job_.ranks : 1,
                                   .precision = last()});
    for (int host = 0; host < layout_.hosts(); ++host) {
      if (host != host_) plan_.after(own, plan_.add(fold, counterpart(host, place_)));
    }
  });
  plan_.begin({});
}

}  // namespace

void append_in_parts(Plan& plan, const Job& job, std::size_t chunk_bytes, Scratch& scratch) {
  Parts parts(plan, job, scratch);
  job.call.kind == Kind::AllGather ? parts.all_gather(chunk_bytes)
                                   : parts.reduce_scatter(chunk_bytes);
}

}  // namespace weft::transport::mesh
