// SPDX-License-Identifier: Apache-2.0
// Collectives in two levels. Most are made of stages, each of which is a collective of another
// kind among the ranks of one host, or among ranks of different hosts (algorithms.cc writes its
// steps). Only the data that a host does not have crosses the network: of an all_reduce over h
// hosts, each host sends and receives 2 (h - 1) / h of the bytes, as in a ring of hosts.
//
// Chunks begin in order, and at most kWindow are under way (the `turn` of a stage). So a message
// that a rank cannot receive yet never holds up one that it waits for: all messages of earlier
// chunks have been sent on that connection before, or do not depend on the waiting one.
#include <algorithm>
#include <array>

#include <weft/transport/mesh/algorithms.h>

namespace weft::transport::mesh {

namespace {

using Index = Plan::Index;

// Chunks of the stages' own algorithms: each stage takes its memory as one.
constexpr std::size_t kWhole = std::size_t{1} << 62;

std::byte* address(const Slice& slice) { return static_cast<std::byte*>(slice.data); }
Slice slice_at(std::byte* data, std::size_t bytes) { return {data, bytes, Device::host()}; }

class Levels {
 public:
  Levels(Plan& plan, const Job& job, Scratch& scratch)
      : plan_(plan),
        job_(job),
        layout_(*job.layout),
        scratch_(scratch),
        host_(layout_.host_of(job.rank)),
        place_(layout_.place_of(job.rank)),
        mates_(layout_.ranks_on(host_)) {}

  void all_reduce_by_leaders(Kind between_hosts);
  void broadcast_by_leaders();
  void reduce_by_leaders();
  void all_reduce_in_slices(std::size_t chunk_bytes);
  void broadcast_in_slices(std::size_t chunk_bytes);
  void reduce_in_slices(std::size_t chunk_bytes);
  void all_gather(std::size_t chunk_bytes);
  void reduce_scatter(std::size_t chunk_bytes);

 private:
  bool is_alone() const { return mates_.size() == 1; }
  int members() const { return static_cast<int>(mates_.size()); }
  int root_host() const { return layout_.host_of(job_.call.root); }
  int root_place() const { return layout_.place_of(job_.call.root); }
  // The rank of a host that exchanges data with the ranks of this place on other hosts.
  int counterpart(int host, int place) const {
    const auto& ranks = layout_.ranks_on(host);
    return ranks[static_cast<std::size_t>(place) % ranks.size()];
  }
  // Leads its host; if there is a root, that leads its own.
  int leader(int host, bool has_root) const {
    return has_root && host == root_host() ? job_.call.root : layout_.ranks_on(host).front();
  }

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

  Slice slice_of(const Slice& chunk, int slice) const;
  // The slices of each rank of this host, by place.
  std::vector<Slice> shares(const Slice& chunk) const;
  // Calls function(slice, memory) for the slices of this rank.
  template <class Function>
  void for_each_own(const Slice& chunk, const Function& function) const;
  // Calls function(k, turn) for so many chunks.
  template <class Function>
  void in_turn(std::size_t chunks, const Function& function);
  // Calls function(chunk, turn) for the chunks of the memory.
  template <class Function>
  void for_each_chunk(const Slice& memory, std::size_t chunk_bytes, const Function& function);
  // Calls function(rank) for the ranks of other hosts whose counterpart on this host is `mate`.
  template <class Function>
  void for_each_far(int mate, const Function& function) const;
  template <class Function>
  void for_each_mate_in_turn(const Function& function) const;

  Plan& plan_;
  const Job& job_;
  const Layout& layout_;
  Scratch& scratch_;
  const int host_;
  const int place_;
  const std::vector<int>& mates_;  // the ranks of this host
};

Slice Levels::slice_of(const Slice& chunk, int slice) const {
  const auto slices = static_cast<std::size_t>(layout_.slices());
  // Slices consist of whole elements and cache lines.
  const std::size_t bytes = ((chunk.bytes + slices - 1) / slices + 63) / 64 * 64;
  const std::size_t begin = std::min(static_cast<std::size_t>(slice) * bytes, chunk.bytes);
  return chunk.part(begin, std::min(bytes, chunk.bytes - begin));
}

std::vector<Slice> Levels::shares(const Slice& chunk) const {
  std::vector<Slice> all;
  for (int place = 0; place < members(); ++place) {
    const int first = layout_.first_slice(host_, place);
    const int last = layout_.first_slice(host_, place + 1) - 1;
    const Slice begin = slice_of(chunk, first), end = slice_of(chunk, last);
    const auto bytes = static_cast<std::size_t>(address(end) - address(begin)) + end.bytes;
    all.push_back(slice_at(address(begin), bytes));
  }
  return all;
}

template <class Function>
void Levels::for_each_own(const Slice& chunk, const Function& function) const {
  const int end = layout_.first_slice(host_, place_ + 1);
  for (int slice = layout_.first_slice(host_, place_); slice < end; ++slice) {
    if (const Slice memory = slice_of(chunk, slice); memory.bytes > 0) function(slice, memory);
  }
}

template <class Function>
void Levels::in_turn(std::size_t chunks, const Function& function) {
  std::array<Index, kWindow> ends;
  ends.fill(Plan::kNone);
  Index turn = Plan::kNone;
  for (std::size_t k = 0; k < chunks; ++k) {
    // A step releases those that wait for it in the reverse order, so this chunk's sends before the
    // turn of the next.
    const Index before = ends[(k + 1) % kWindow];
    const Index next = before == Plan::kNone ? turn : plan_.both(turn, before);
    const Index first = plan_.next();
    function(k, turn);
    ends[k % kWindow] = plan_.all_since(first, turn, /*with_sends=*/true);
    turn = next;
  }
}

template <class Function>
void Levels::for_each_chunk(const Slice& memory, std::size_t chunk_bytes,
                            const Function& function) {
  const std::size_t chunks =
      std::max<std::size_t>(1, (memory.bytes + chunk_bytes - 1) / chunk_bytes);
  in_turn(chunks, [&](std::size_t k, Index turn) {
    const std::size_t begin = k * chunk_bytes;
    function(memory.part(begin, std::min(chunk_bytes, memory.bytes - begin)), turn);
  });
}

template <class Function>
void Levels::for_each_far(int mate, const Function& function) const {
  for (int host = 0; host < layout_.hosts(); ++host) {
    if (host == host_) continue;
    for (const int rank : layout_.ranks_on(host)) {
      if (counterpart(host_, layout_.place_of(rank)) == mate) function(rank);
    }
  }
}

template <class Function>
void Levels::for_each_mate_in_turn(const Function& function) const {
  for (int step = 1; step < members(); ++step)
    function(mates_[static_cast<std::size_t>((place_ + step) % members())]);
}

// Reduces to the leaders, then over the leaders, and hands the result out. A barrier is the same
// without data.
void Levels::all_reduce_by_leaders(Kind kind) {
  Index ready = Plan::kNone;
  if (!is_alone()) {
    Job gather = on_host(Kind::Reduce);
    gather.data = job_.data;
    gather.call.root = 0;
    ready = add(mates_, gather, {Algorithm::Direct, kWhole}, ready, Plan::kNone);
  }
  if (place_ == 0) {
    Job exchange = between_hosts(kind);
    exchange.data = job_.data;
    exchange.averaged = job_.ranks;
    const bool many = layout_.hosts() >= kManyHosts;
    ready = add(layout_.owners(0), exchange, {many ? Algorithm::Doubling : Algorithm::Direct},
                ready, Plan::kNone);
  }
  if (is_alone()) return;
  Job result = on_host(Kind::Broadcast);
  result.data = job_.data;
  result.call.root = 0;
  add(mates_, result, {Algorithm::Direct}, ready, Plan::kNone);
}

void Levels::broadcast_by_leaders() {
  Index ready = Plan::kNone;
  const int own = leader(host_, /*has_root=*/true);
  if (job_.rank == own) {
    std::vector<int> leaders;
    for (int host = 0; host < layout_.hosts(); ++host) leaders.push_back(leader(host, true));
    Job exchange = between_hosts(Kind::Broadcast);
    exchange.data = job_.data;
    exchange.call.root = root_host();
    const bool many = layout_.hosts() >= kManyHosts;
    ready =
        add(leaders, exchange, {many ? Algorithm::Tree : Algorithm::Direct}, ready, Plan::kNone);
  }
  if (is_alone()) return;
  Job result = on_host(Kind::Broadcast);
  result.data = job_.data;
  result.call.root = layout_.place_of(own);
  add(mates_, result, {Algorithm::Direct}, ready, Plan::kNone);
}

void Levels::reduce_by_leaders() {
  const int own = leader(host_, /*has_root=*/true);
  Index ready = Plan::kNone;
  Slice sum = job_.data;
  if (!is_alone()) {
    Job gather = on_host(Kind::Reduce);
    gather.data = job_.data;
    gather.call.root = layout_.place_of(own);
    // Only root's bytes may change.
    if (job_.rank == own && own != job_.call.root) {
      sum = slice_at(plan_.scratch(sum.bytes, scratch_), sum.bytes);
      gather.result = address(sum);
    }
    ready = add(mates_, gather, {Algorithm::Direct, kWhole}, ready, Plan::kNone);
  }
  if (job_.rank != own) return;
  std::vector<int> leaders;
  for (int host = 0; host < layout_.hosts(); ++host) leaders.push_back(leader(host, true));
  Job exchange = between_hosts(Kind::Reduce);
  exchange.data = sum;
  exchange.call.root = root_host();
  exchange.averaged = job_.ranks;
  add(leaders, exchange, {Algorithm::Direct, kWhole}, ready, Plan::kNone);
}

void Levels::all_reduce_in_slices(std::size_t chunk_bytes) {
  // Not Halving: it waits for one peer before it receives from the next, so two slices or chunks
  // between the same ranks could wait for each other.
  const Choice choice{layout_.hosts() < kManyHosts ? Algorithm::Blocks : Algorithm::Ring, kWhole};
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    const auto all = shares(chunk);
    const Slice& mine = all[static_cast<std::size_t>(place_)];
    Index ready = Plan::kNone;
    if (!is_alone()) {
      Job sum = on_host(Kind::ReduceScatter);
      sum.inputs = all;
      sum.data = mine;
      ready = add(mates_, sum, {Algorithm::Blocks, kWhole}, ready, turn);
    }
    const Index first = plan_.next(), summed = ready;
    for_each_own(chunk, [&](int slice, const Slice& memory) {
      Job exchange = between_hosts(Kind::AllReduce);
      exchange.data = memory;
      exchange.averaged = job_.ranks;
      add(layout_.owners(slice), exchange, choice, summed, turn);
    });
    ready = plan_.all_since(first, summed, /*with_sends=*/false);
    if (is_alone()) return;
    Job result = on_host(Kind::AllGather);
    result.data = mine;
    result.outputs = all;
    add(mates_, result, {Algorithm::Direct, kWhole}, ready, turn);
  });
}

// On root's host all ranks get a chunk; each sends its slice to the other hosts.
void Levels::broadcast_in_slices(std::size_t chunk_bytes) {
  const bool is_first = host_ == root_host();
  const Choice within{members() > 2 ? Algorithm::Blocks : Algorithm::Direct, kWhole};
  const Choice between{layout_.hosts() > 2 ? Algorithm::Blocks : Algorithm::Direct, kWhole};
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    Index ready = Plan::kNone;
    if (is_first && !is_alone()) {
      Job own = on_host(Kind::Broadcast);
      own.data = chunk;
      own.call.root = root_place();
      ready = add(mates_, own, within, ready, turn);
    }
    const Index first = plan_.next(), here = ready;
    for_each_own(chunk, [&](int slice, const Slice& memory) {
      Job exchange = between_hosts(Kind::Broadcast);
      exchange.data = memory;
      exchange.call.root = root_host();
      add(layout_.owners(slice), exchange, between, here, turn);
    });
    ready = plan_.all_since(first, here, /*with_sends=*/false);
    if (is_first || is_alone()) return;
    const auto all = shares(chunk);
    Job result = on_host(Kind::AllGather);
    result.data = all[static_cast<std::size_t>(place_)];
    result.outputs = all;
    add(mates_, result, {Algorithm::Direct, kWhole}, ready, turn);
  });
}

void Levels::reduce_in_slices(std::size_t chunk_bytes) {
  const Choice choice{layout_.hosts() > 2 ? Algorithm::Blocks : Algorithm::Direct, kWhole};
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    const auto all = shares(chunk);
    const Slice& mine = all[static_cast<std::size_t>(place_)];
    Index ready = Plan::kNone;
    Slice partial = mine;
    if (!is_alone()) {
      // Only root's bytes may change.
      if (job_.rank != job_.call.root)
        partial = slice_at(plan_.scratch(mine.bytes, scratch_), mine.bytes);
      Job sum = on_host(Kind::ReduceScatter);
      sum.inputs = all;
      sum.data = partial;
      ready = add(mates_, sum, {Algorithm::Blocks, kWhole}, ready, turn);
    }
    const Index first = plan_.next(), summed = ready;
    for_each_own(chunk, [&](int slice, const Slice& memory) {
      const auto begin = static_cast<std::size_t>(address(memory) - address(mine));
      Job exchange = between_hosts(Kind::Reduce);
      exchange.data = partial.part(begin, memory.bytes);
      exchange.call.root = root_host();
      exchange.averaged = job_.ranks;
      add(layout_.owners(slice), exchange, choice, summed, turn);
    });
    ready = plan_.all_since(first, summed, /*with_sends=*/false);
    if (host_ != root_host() || is_alone()) return;
    Job result = on_host(Kind::Gather);
    result.data = partial;
    result.outputs = all;
    result.call.root = root_place();
    add(mates_, result, {Algorithm::Direct}, ready, turn);
  });
}

// A rank sends its data to its counterpart on each other host, which hands it to the ranks there.
void Levels::all_gather(std::size_t chunk_bytes) {
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
void Levels::reduce_scatter(std::size_t chunk_bytes) {
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
  for_each_far(job_.rank, [&](int rank) {
    const std::size_t bytes = part(rank).bytes;
    sum(rank) = is_alone() ? part(rank) : slice_at(plan_.scratch(bytes, scratch_), bytes);
  });
  sum(job_.rank) = is_alone() ? part(job_.rank) : job_.data;
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
      const Slice piece = chunk_of(part(rank), k), out = chunk_of(sum(rank), k);
      Index reduced = Plan::kNone;
      if (!is_alone()) {
        const Index fold = plan_.fold({.own = address(piece),
                                       .out = address(out),
                                       .bytes = piece.bytes,
                                       .others = static_cast<std::uint32_t>(members() - 1)});
        for (const int mate : mates_) {
          if (mate != job_.rank) reduced = plan_.add(fold, mate);
        }
      }
      if (rank == job_.rank) {
        own = reduced;
      } else {
        plan_.after(reduced, plan_.send(rank, address(out), out.bytes));
      }
    });
    if (k >= chunks_of(job_.rank)) return;
    const Slice mine = chunk_of(sum(job_.rank), k), out = chunk_of(job_.data, k);
    const bool averages = job_.call.op == ReduceOp::Avg;
    const Index fold = plan_.fold({.own = address(mine),
                                   .out = address(out),
                                   .bytes = mine.bytes,
                                   .others = static_cast<std::uint32_t>(layout_.hosts() - 1),
                                   .scale = averages ? 1.0 / job_.ranks : 1});
    for (int host = 0; host < layout_.hosts(); ++host) {
      if (host != host_) plan_.after(own, plan_.add(fold, counterpart(host, place_)));
    }
  });
  plan_.begin({});
}

}  // namespace

void append_levels(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch) {
  Levels levels(plan, job, scratch);
  const bool by_leaders = choice.algorithm == Algorithm::Leaders;
  const std::size_t chunk = choice.chunk_bytes;
  switch (job.call.kind) {
    case Kind::AllReduce:
      return by_leaders ? levels.all_reduce_by_leaders(Kind::AllReduce)
                        : levels.all_reduce_in_slices(chunk);
    case Kind::Broadcast:
      return by_leaders ? levels.broadcast_by_leaders() : levels.broadcast_in_slices(chunk);
    case Kind::Reduce:
      return by_leaders ? levels.reduce_by_leaders() : levels.reduce_in_slices(chunk);
    case Kind::AllGather: return levels.all_gather(chunk);
    case Kind::ReduceScatter: return levels.reduce_scatter(chunk);
    case Kind::Barrier: return levels.all_reduce_by_leaders(Kind::Barrier);
    case Kind::Gather:
    case Kind::Scatter:
    case Kind::AllToAll: return append(plan, job, {Algorithm::Direct}, scratch);
  }
}

}  // namespace weft::transport::mesh
