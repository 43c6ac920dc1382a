// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/large_copy.h>
#include <weft/transport/mesh/levels.h>

namespace weft::transport::mesh {

namespace {

using Index = Plan::Index;

std::byte* address(const Slice& slice) { return static_cast<std::byte*>(slice.data); }
const Slice& of(std::span<const Slice> slices, int rank) {
  return slices[static_cast<std::size_t>(rank)];
}

// Call function(peer) for all other ranks: the first in the order of ranks, the second starting
// after this rank, so that not all ranks send to the same one first.
template <class Function>
void for_each_peer(const Job& job, Function&& function) {
  for (int peer = 0; peer < job.ranks; ++peer) {
    if (peer != job.rank) function(peer);
  }
}
template <class Function>
void for_each_peer_in_turn(const Job& job, Function&& function) {
  for (int step = 1; step < job.ranks; ++step) function((job.rank + step) % job.ranks);
}

void copy_own(Plan& plan, const Slice& to, const Slice& from) {
  if (to.data != from.data) plan.copy(address(to), address(from), from.bytes);
}

// Copies numbers before other steps: when the plan is written, or once the stage may read them.
// Returns the step that the others have to wait for.
Index copy_first(Plan& plan, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (plan.stage().ready != Plan::kNone) return plan.copy(to, from, bytes);
  copy_part(to, from, bytes, bytes);
  return Plan::kNone;
}

double scale_of(const Job& job) {
  return job.call.op == ReduceOp::Avg ? 1.0 / (job.averaged > 0 ? job.averaged : job.ranks) : 1;
}

// Memory cut into blocks, one for each owner, and blocks cut into chunks. An empty block has one
// empty chunk, so that every rank hears from every other.
struct Cut {
  std::byte* data;
  std::size_t bytes;
  std::size_t block_bytes;
  std::size_t chunk_bytes;

  Cut(const Slice& slice, int blocks, std::size_t chunk)
      : data(address(slice)), bytes(slice.bytes), block_bytes(0), chunk_bytes(chunk) {
    const auto count = static_cast<std::size_t>(blocks);
    block_bytes = ((bytes + count - 1) / count + 63) / 64 * 64;  // whole elements and cache lines
  }

  std::size_t begin(int block) const {
    return std::min(static_cast<std::size_t>(block) * block_bytes, bytes);
  }
  std::size_t size(int block) const { return begin(block + 1) - begin(block); }
  std::size_t chunks(int block) const {
    return std::max<std::size_t>(1, (size(block) + chunk_bytes - 1) / chunk_bytes);
  }
  std::size_t most_chunks() const { return chunks(0); }
  Slice chunk(int block, std::size_t index) const {
    const std::size_t first = std::min(index * chunk_bytes, size(block));
    return {data + begin(block) + first, std::min(chunk_bytes, size(block) - first),
            Device::host()};
  }
};

// For each peer, the steps of the last kWindow chunks. A chunk waits for the step of the chunk
// kWindow before it.
class Window {
 public:
  explicit Window(int ranks) : steps_(static_cast<std::size_t>(ranks) * kWindow, Plan::kNone) {}
  // The slot of a chunk. Until it is set, it holds the step of the chunk kWindow before.
  Index& at(int peer, std::size_t chunk) {
    return steps_[static_cast<std::size_t>(peer) * kWindow + chunk % kWindow];
  }

 private:
  std::vector<Index> steps_;
};

// Adds a send that waits for the step in its slot of the window, and puts itself there.
Index send_in_window(Plan& plan, Window& window, int peer, std::size_t chunk, const Slice& slice) {
  const Index step = plan.send(peer, address(slice), slice.bytes);
  plan.after(window.at(peer, chunk), step);
  return window.at(peer, chunk) = step;
}

// Every rank sends to every other and reduces in the order of ranks, so that all results are
// bitwise equal. A rank sends a copy, because the result may be written before all sends are done.
void all_reduce_direct(Plan& plan, const Job& job, Scratch& scratch) {
  std::byte* const data = address(job.data);
  std::size_t bytes = job.data.bytes;
  const std::byte* own = data;
  const std::byte* sent = job.from;
  Index copied = Plan::kNone;
  if (sent == nullptr) {
    std::byte* const copy = plan.scratch(bytes, scratch);
    copied = copy_first(plan, copy, data, bytes);
    sent = copy;
  } else {
    own = job.from;
    if (job.precision == Precision::Narrows)
      bytes = bytes / size_of(job.call.dtype) * sizeof(float);
  }
  for_each_peer_in_turn(job, [&](int peer) { plan.after(copied, plan.send(peer, sent, bytes)); });
  const Index sum = plan.fold({.own = own,
                               .out = data,
                               .bytes = bytes,
                               .others = static_cast<std::uint32_t>(job.ranks - 1),
                               .own_position = static_cast<std::uint32_t>(job.rank),
                               .scale = scale_of(job),
                               .precision = job.precision});
  for_each_peer(job, [&](int peer) { plan.after(copied, plan.add(sum, peer)); });
}

// Chunk by chunk, a rank sends the peers' blocks to their owners, reduces its own block straight
// from the peers' messages, and sends the result to all peers. A chunk waits until the chunk
// kWindow before it has come back from its owner, which bounds the data in transit in both
// directions.
void all_reduce_blocks(Plan& plan, const Job& job, std::size_t chunk_bytes) {
  const Cut cut(job.data, job.ranks, chunk_bytes);
  Window returned(job.ranks);
  for (std::size_t k = 0; k < cut.most_chunks(); ++k) {
    for_each_peer_in_turn(job, [&](int peer) {
      if (k >= cut.chunks(peer)) return;
      const Slice theirs = cut.chunk(peer, k);
      plan.after(returned.at(peer, k), plan.send(peer, address(theirs), theirs.bytes));
    });
    const bool owns = k < cut.chunks(job.rank);
    const Slice mine = cut.chunk(job.rank, k);
    Index reduced = Plan::kNone;
    if (owns) {
      const Index sum = plan.fold({.own = address(mine),
                                   .out = address(mine),
                                   .bytes = mine.bytes,
                                   .others = static_cast<std::uint32_t>(job.ranks - 1),
                                   .scale = scale_of(job)});
      for_each_peer(job, [&](int peer) { reduced = plan.add(sum, peer); });
    }
    for_each_peer_in_turn(job, [&](int peer) {
      if (owns) plan.after(reduced, plan.send(peer, address(mine), mine.bytes));
      if (k >= cut.chunks(peer)) return;
      const Slice theirs = cut.chunk(peer, k);
      returned.at(peer, k) = plan.receive(peer, address(theirs), theirs.bytes);
    });
  }
}

// Sums travel round the ring: in the first round each rank adds its numbers to those from its left
// neighbour and passes the sum on; in the second round ranks pass the results on.
void all_reduce_ring(Plan& plan, const Job& job, std::size_t chunk_bytes) {
  const int ranks = job.ranks;
  const int right = (job.rank + 1) % ranks, left = (job.rank + ranks - 1) % ranks;
  const Cut cut(job.data, ranks, chunk_bytes);
  const auto block = [&](int distance) { return ((job.rank + distance) % ranks + ranks) % ranks; };
  Window ended(1);
  for (std::size_t k = 0; k < cut.most_chunks(); ++k) {
    Index before = ended.at(0, k);
    for (int step = 0; step < ranks - 1; ++step) {
      const Slice sent = cut.chunk(block(-step), k), sum = cut.chunk(block(-step - 1), k);
      plan.after(before, plan.send(right, address(sent), sent.bytes));
      const bool is_whole = step == ranks - 2;
      before = plan.add(plan.fold({.own = address(sum),
                                   .out = address(sum),
                                   .bytes = sum.bytes,
                                   .others = 1,
                                   .own_position = 1,
                                   .scale = is_whole ? scale_of(job) : 1}),
                        left);
    }
    for (int step = 0; step < ranks - 1; ++step) {
      const Slice sent = cut.chunk(block(1 - step), k), got = cut.chunk(block(-step), k);
      plan.after(before, plan.send(right, address(sent), sent.bytes));
      before = plan.receive(left, address(got), got.bytes);
    }
    ended.at(0, k) = before;
  }
}

// The ranks of a collective that works in pairs. The largest power of two of them take part. Each
// other rank has a neighbour that takes its numbers before and sends it the result afterwards.
struct Pairs {
  int power = 1;   // ranks that take part
  int extra = 0;   // ranks that do not: the even ones of the first 2 * extra
  int place = -1;  // of this rank among those that take part; -1 if it does not

  explicit Pairs(const Job& job) {
    while (power * 2 <= job.ranks) power *= 2;
    extra = job.ranks - power;
    if (job.rank >= 2 * extra) place = job.rank - extra;
    if (job.rank < 2 * extra && job.rank % 2 == 1) place = job.rank / 2;
  }
  bool takes_part() const { return place >= 0; }
  int rank_at(int other) const { return other < extra ? 2 * other + 1 : other + extra; }
  bool has_neighbour(const Job& job) const { return job.rank < 2 * extra; }
};

// For a rank that does not take part: sends its numbers to its neighbour and receives the result.
// (The result is sent only after the numbers have arrived, so the receive may use the same memory.)
void leave_to_neighbour(Plan& plan, const Job& job) {
  plan.send(job.rank + 1, address(job.data), job.data.bytes);
  plan.receive(job.rank + 1, address(job.data), job.data.bytes);
}

// Reduces this rank's numbers with those of `peer`. The numbers of the lower place come first, so
// that both sides get the same bits.
Plan::Index reduce_pair(Plan& plan, const Slice& own, std::byte* out, int peer, bool is_lower,
                        double scale) {
  return plan.add(plan.fold({.own = address(own),
                             .out = out,
                             .bytes = own.bytes,
                             .others = 1,
                             .own_position = is_lower ? 0u : 1u,
                             .scale = scale}),
                  peer);
}

// In round i every rank holds the sum of 2^i ranks, exchanges it with a peer and so gets the sum of
// 2^(i+1). Each round writes to fresh memory, because its sum may be complete before the previous
// one has been sent.
void all_reduce_doubling(Plan& plan, const Job& job, Scratch& scratch) {
  const Pairs pairs(job);
  if (!pairs.takes_part()) return leave_to_neighbour(plan, job);
  const std::size_t bytes = job.data.bytes;
  Slice sum{plan.scratch(bytes, scratch), bytes, Device::host()};
  Index here = Plan::kNone;
  if (pairs.has_neighbour(job)) {
    here = reduce_pair(plan, job.data, address(sum), job.rank - 1, /*is_lower=*/false, 1);
  } else {
    here = copy_first(plan, address(sum), address(job.data), bytes);
  }
  for (int distance = 1; distance < pairs.power; distance *= 2) {
    const int peer = pairs.rank_at(pairs.place ^ distance);
    const bool is_last = distance * 2 == pairs.power;
    plan.after(here, plan.send(peer, address(sum), bytes));
    const Slice next{is_last ? address(job.data) : plan.scratch(bytes, scratch), bytes,
                     Device::host()};
    const Index reduced = reduce_pair(plan, sum, address(next), peer, (pairs.place & distance) == 0,
                                      is_last ? scale_of(job) : 1);
    plan.after(here, reduced);
    here = reduced;
    sum = next;
  }
  if (pairs.has_neighbour(job)) plan.after(here, plan.send(job.rank - 1, address(job.data), bytes));
}

// Each rank sends one half of its range to its peer, which reduces it, and reduces the other half
// with the peer's numbers; then it halves that half, and so on. The results travel back the same
// way. (A result is sent only after the numbers for it have arrived, so the receives may use the
// same memory.)
void all_reduce_halving(Plan& plan, const Job& job) {
  const Pairs pairs(job);
  if (!pairs.takes_part()) return leave_to_neighbour(plan, job);
  Index here = Plan::kNone;
  if (pairs.has_neighbour(job)) {
    here = reduce_pair(plan, job.data, address(job.data), job.rank - 1, /*is_lower=*/false, 1);
  }
  struct Range {
    std::size_t begin, end;
  };
  const auto part = [&](const Range& range) {
    return job.data.part(range.begin, range.end - range.begin);
  };
  std::vector<Range> kept{{0, job.data.bytes}}, given;  // by round
  for (int distance = pairs.power / 2; distance > 0; distance /= 2) {
    const int peer = pairs.rank_at(pairs.place ^ distance);
    const bool is_lower = (pairs.place & distance) == 0;
    const auto [begin, end] = kept.back();
    // Halves consist of whole elements and cache lines.
    const std::size_t middle = begin + (end - begin) / 2 / 64 * 64;
    const Range lower{begin, middle}, upper{middle, end};
    kept.push_back(is_lower ? lower : upper);
    given.push_back(is_lower ? upper : lower);
    const Slice sent = part(given.back()), own = part(kept.back());
    plan.after(here, plan.send(peer, address(sent), sent.bytes));
    const Index reduced =
        reduce_pair(plan, own, address(own), peer, is_lower, distance == 1 ? scale_of(job) : 1);
    plan.after(here, reduced);
    here = reduced;
  }
  for (int distance = 1; distance < pairs.power; distance *= 2) {
    const int peer = pairs.rank_at(pairs.place ^ distance);
    const Slice sent = part(kept.back()), got = part(given.back());
    plan.after(here, plan.send(peer, address(sent), sent.bytes));
    const Index come = plan.receive(peer, address(got), got.bytes);
    plan.after(here, come);
    here = come;
    kept.pop_back();
    given.pop_back();
  }
  if (pairs.has_neighbour(job))
    plan.after(here, plan.send(job.rank - 1, address(job.data), job.data.bytes));
}

void broadcast_direct(Plan& plan, const Job& job) {
  const int root = job.call.root;
  if (job.rank != root) {
    plan.receive(root, address(job.data), job.data.bytes);
    return;
  }
  for_each_peer_in_turn(job, [&](int peer) { plan.send(peer, address(job.data), job.data.bytes); });
}

// Places are counted from root. A rank receives from the place without its own lowest set bit, and
// sends to the places that have one more, lower bit set.
void broadcast_tree(Plan& plan, const Job& job) {
  const int place = (job.rank - job.call.root + job.ranks) % job.ranks;
  const auto rank_at = [&](int other) { return (other + job.call.root) % job.ranks; };
  Index here = Plan::kNone;
  int bit = 1;
  while (bit < job.ranks && (place & bit) == 0) bit *= 2;
  if (place != 0) here = plan.receive(rank_at(place - bit), address(job.data), job.data.bytes);
  for (bit /= 2; bit > 0; bit /= 2) {
    if (place + bit >= job.ranks) continue;
    plan.after(here, plan.send(rank_at(place + bit), address(job.data), job.data.bytes));
  }
}

// Every rank but root owns a block. Root sends each block once to its owner, chunk by chunk, and
// the owner sends it to the others.
void broadcast_blocks(Plan& plan, const Job& job, std::size_t chunk_bytes) {
  const int root = job.call.root;
  const Cut cut(job.data, job.ranks - 1, chunk_bytes);
  const auto block_of = [&](int rank) { return rank < root ? rank : rank - 1; };
  Window sent(job.ranks);
  for (std::size_t k = 0; k < cut.most_chunks(); ++k) {
    Index here = Plan::kNone;
    const bool is_owner = job.rank != root && k < cut.chunks(block_of(job.rank));
    const Slice mine = is_owner ? cut.chunk(block_of(job.rank), k) : Slice();
    if (is_owner) here = plan.receive(root, address(mine), mine.bytes);
    for_each_peer_in_turn(job, [&](int peer) {
      if (is_owner && peer != root) plan.after(here, plan.send(peer, address(mine), mine.bytes));
      if (peer == root || k >= cut.chunks(block_of(peer))) return;
      const Slice theirs = cut.chunk(block_of(peer), k);
      if (job.rank == root) {
        send_in_window(plan, sent, peer, k, theirs);
      } else {
        plan.receive(peer, address(theirs), theirs.bytes);
      }
    });
  }
}

void reduce_direct(Plan& plan, const Job& job, std::size_t chunk_bytes) {
  const int root = job.call.root;
  const Cut cut(job.data, 1, chunk_bytes);
  const Cut result(Slice{job.result, job.data.bytes, Device::host()}, 1, chunk_bytes);
  Window sent(job.ranks);
  for (std::size_t k = 0; k < cut.most_chunks(); ++k) {
    const Slice part = cut.chunk(0, k);
    if (job.rank != root) {
      send_in_window(plan, sent, root, k, part);
      continue;
    }
    std::byte* const out = job.result == nullptr ? address(part) : address(result.chunk(0, k));
    const Index sum = plan.fold({.own = address(part),
                                 .out = out,
                                 .bytes = part.bytes,
                                 .others = static_cast<std::uint32_t>(job.ranks - 1),
                                 .scale = scale_of(job),
                                 .precision = job.precision});
    for_each_peer(job, [&](int peer) { plan.add(sum, peer); });
  }
}

// Every rank sends each part of its inputs to the part's owner, which reduces it. After each chunk,
// calls then(chunk, step), where `step` ends the reduction of this rank's chunk, or is kNone.
template <class Then>
void reduce_to_owners(Plan& plan, const Job& job, std::span<const Cut> parts, const Slice& out,
                      const Then& then) {
  const auto part = [&](int rank) -> const Cut& { return parts[static_cast<std::size_t>(rank)]; };
  Window sent(job.ranks);
  std::size_t most = 0;
  for (const Cut& cut : parts) most = std::max(most, cut.most_chunks());
  const Cut result(out, 1, part(job.rank).chunk_bytes);
  for (std::size_t k = 0; k < most; ++k) {
    for_each_peer_in_turn(job, [&](int peer) {
      if (k < part(peer).most_chunks()) send_in_window(plan, sent, peer, k, part(peer).chunk(0, k));
    });
    Index reduced = Plan::kNone;
    if (k < part(job.rank).most_chunks()) {
      const Slice mine = part(job.rank).chunk(0, k);
      const Index sum = plan.fold({.own = address(mine),
                                   .out = address(result.chunk(0, k)),
                                   .bytes = mine.bytes,
                                   .others = static_cast<std::uint32_t>(job.ranks - 1),
                                   .scale = scale_of(job),
                                   .precision = job.precision});
      for_each_peer(job, [&](int peer) { reduced = plan.add(sum, peer); });
    }
    then(k, reduced);
  }
}

void reduce_scatter(Plan& plan, const Job& job, std::size_t chunk_bytes) {
  std::vector<Cut> parts;
  for (const Slice& input : job.inputs) parts.emplace_back(input, 1, chunk_bytes);
  reduce_to_owners(plan, job, parts, job.data, [](std::size_t, Index) {});
}

void reduce_blocks(Plan& plan, const Job& job, std::size_t chunk_bytes, Scratch& scratch) {
  const int root = job.call.root;
  const Cut cut(job.data, job.ranks, chunk_bytes);
  std::vector<Cut> parts;
  for (int rank = 0; rank < job.ranks; ++rank) {
    parts.emplace_back(Slice{cut.data + cut.begin(rank), cut.size(rank), Device::host()}, 1,
                       chunk_bytes);
  }
  const Cut& mine = parts[static_cast<std::size_t>(job.rank)];
  // Only root's bytes may change.
  std::byte* const out = job.rank == root ? mine.data : plan.scratch(mine.bytes, scratch);
  const Cut result(Slice{out, mine.bytes, Device::host()}, 1, chunk_bytes);
  reduce_to_owners(
      plan, job, parts, Slice{out, mine.bytes, Device::host()}, [&](std::size_t k, Index reduced) {
        if (job.rank == root) {
          for_each_peer(job, [&](int peer) {
            const Cut& theirs = parts[static_cast<std::size_t>(peer)];
            if (k < theirs.most_chunks())
              plan.receive(peer, address(theirs.chunk(0, k)), theirs.chunk(0, k).bytes);
          });
        } else if (reduced != Plan::kNone) {
          const Slice done = result.chunk(0, k);
          plan.after(reduced, plan.send(root, address(done), done.bytes));
        }
      });
}

void all_gather_direct(Plan& plan, const Job& job, std::size_t chunk_bytes) {
  Window sent(job.ranks);
  const Cut mine(job.data, 1, chunk_bytes);
  for (std::size_t k = 0; k < mine.most_chunks(); ++k) {
    for_each_peer_in_turn(job, [&](int peer) {
      send_in_window(plan, sent, peer, k, mine.chunk(0, k));
      const Slice theirs = Cut(of(job.outputs, peer), 1, chunk_bytes).chunk(0, k);
      plan.receive(peer, address(theirs), theirs.bytes);
    });
  }
  copy_own(plan, of(job.outputs, job.rank), job.data);
}

void all_gather_ring(Plan& plan, const Job& job) {
  const int right = (job.rank + 1) % job.ranks, left = (job.rank + job.ranks - 1) % job.ranks;
  Slice next = job.data;
  Index here = Plan::kNone;
  for (int step = 1; step < job.ranks; ++step) {
    plan.after(here, plan.send(right, address(next), next.bytes));
    next = of(job.outputs, (job.rank - step + job.ranks) % job.ranks);
    here = plan.receive(left, address(next), next.bytes);
  }
  copy_own(plan, of(job.outputs, job.rank), job.data);
}

void gather(Plan& plan, const Job& job) {
  if (job.rank != job.call.root) {
    plan.send(job.call.root, address(job.data), job.data.bytes);
    return;
  }
  for_each_peer(job, [&](int peer) {
    plan.receive(peer, address(of(job.outputs, peer)), of(job.outputs, peer).bytes);
  });
  copy_own(plan, of(job.outputs, job.rank), job.data);
}

void scatter(Plan& plan, const Job& job) {
  if (job.rank != job.call.root) {
    plan.receive(job.call.root, address(job.data), job.data.bytes);
    return;
  }
  for_each_peer(job, [&](int peer) {
    plan.send(peer, address(of(job.inputs, peer)), of(job.inputs, peer).bytes);
  });
  copy_own(plan, job.data, of(job.inputs, job.rank));
}

void all_to_all(Plan& plan, const Job& job) {
  for_each_peer_in_turn(job, [&](int peer) {
    plan.send(peer, address(of(job.inputs, peer)), of(job.inputs, peer).bytes);
    plan.receive(peer, address(of(job.outputs, peer)), of(job.outputs, peer).bytes);
  });
  copy_own(plan, of(job.outputs, job.rank), of(job.inputs, job.rank));
}

// In round i a rank hears from the rank 2^i before it, which has heard of 2^i ranks. So after
// log2(ranks) rounds every rank has heard of all.
void barrier(Plan& plan, const Job& job) {
  Index heard = Plan::kNone;
  for (int distance = 1; distance < job.ranks; distance *= 2) {
    plan.after(heard, plan.send((job.rank + distance) % job.ranks, nullptr, 0));
    const Index next = plan.receive((job.rank - distance + job.ranks) % job.ranks, nullptr, 0);
    plan.after(heard, next);  // a round is complete only after all earlier ones
    heard = next;
  }
}

// Along a binary tree: a rank tells its parent when its children have told it, and its children
// when its parent has told it. So it needs three connections at most.
void barrier_tree(Plan& plan, const Job& job) {
  Index heard = Plan::kNone;
  const auto hear = [&](int peer) {
    const Index next = plan.receive(peer, nullptr, 0);
    plan.after(heard, next);
    heard = next;
  };
  const int first = 2 * job.rank + 1, last = std::min(first + 1, job.ranks - 1);
  for (int child = first; child <= last; ++child) hear(child);
  if (job.rank > 0) {
    const int parent = (job.rank - 1) / 2;
    plan.after(heard, plan.send(parent, nullptr, 0));
    hear(parent);
  }
  for (int child = first; child <= last; ++child) plan.after(heard, plan.send(child, nullptr, 0));
}

// The plan of a group with one rank: copies input to output.
void write_alone(Plan& plan, const Job& job) {
  if (!job.outputs.empty() && !job.inputs.empty())
    return copy_own(plan, job.outputs[0], job.inputs[0]);
  if (!job.outputs.empty()) return copy_own(plan, job.outputs[0], job.data);
  if (!job.inputs.empty()) return copy_own(plan, job.data, job.inputs[0]);
}

}  // namespace

void write(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch) {
  plan.clear(job.ranks);
  plan.arithmetic = arithmetic_of(job.call.dtype, job.call.op, job.ranks);
  const bool has_parts = job.call.kind == Kind::AllGather || job.call.kind == Kind::ReduceScatter;
  const bool is_gathered =
      job.call.kind == Kind::AllToAll && choice.algorithm == Algorithm::Leaders;
  if (is_gathered) return append_exchange(plan, job, scratch);
  if (choice.algorithm == Algorithm::Leaders) return append_by_leaders(plan, job, scratch);
  if (choice.algorithm != Algorithm::Slices) return append(plan, job, choice, scratch);
  has_parts ? append_in_parts(plan, job, choice.chunk_bytes, scratch)
            : append_in_slices(plan, job, choice.chunk_bytes, scratch);
}

void append(Plan& plan, const Job& job, const Choice& choice, Scratch& scratch) {
  if (job.ranks == 1) return write_alone(plan, job);
  const auto [algorithm, chunk] = choice;
  switch (job.call.kind) {
    case Kind::AllReduce:
      if (algorithm == Algorithm::Direct) return all_reduce_direct(plan, job, scratch);
      if (algorithm == Algorithm::Ring) return all_reduce_ring(plan, job, chunk);
      if (algorithm == Algorithm::Doubling) return all_reduce_doubling(plan, job, scratch);
      if (algorithm == Algorithm::Halving) return all_reduce_halving(plan, job);
      return all_reduce_blocks(plan, job, chunk);
    case Kind::Broadcast:
      if (algorithm == Algorithm::Direct) return broadcast_direct(plan, job);
      if (algorithm == Algorithm::Tree) return broadcast_tree(plan, job);
      return broadcast_blocks(plan, job, chunk);
    case Kind::Reduce:
      return algorithm == Algorithm::Direct ? reduce_direct(plan, job, chunk)
                                            : reduce_blocks(plan, job, chunk, scratch);
    case Kind::AllGather:
      return algorithm == Algorithm::Direct ? all_gather_direct(plan, job, chunk)
                                            : all_gather_ring(plan, job);
    case Kind::ReduceScatter: return reduce_scatter(plan, job, chunk);
    case Kind::Gather: return gather(plan, job);
    case Kind::Scatter: return scatter(plan, job);
    case Kind::AllToAll: return all_to_all(plan, job);
    case Kind::Barrier:
      return algorithm == Algorithm::Tree ? barrier_tree(plan, job) : barrier(plan, job);
  }
}

}  // namespace weft::transport::mesh
