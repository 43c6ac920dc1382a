// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/transport/mesh/levels.h>

namespace weft::transport::mesh {

namespace {

using Index = Plan::Index;

// One of so many pieces of memory, which consist of whole elements and cache lines.
Slice piece_of(const Slice& memory, int pieces, int index) {
  const auto count = static_cast<std::size_t>(pieces);
  const std::size_t bytes = ((memory.bytes + count - 1) / count + 63) / 64 * 64;
  const std::size_t begin = std::min(static_cast<std::size_t>(index) * bytes, memory.bytes);
  return memory.part(begin, std::min(bytes, memory.bytes - begin));
}
std::vector<Slice> pieces_of(const Slice& memory, int pieces) {
  std::vector<Slice> all;
  for (int index = 0; index < pieces; ++index) all.push_back(piece_of(memory, pieces, index));
  return all;
}

class Slices : Levels {
 public:
  using Levels::Levels;
  void all_reduce(std::size_t chunk_bytes);
  void broadcast(std::size_t chunk_bytes);
  void reduce(std::size_t chunk_bytes);

 private:
  // Reduces the shares of this host; this rank's goes to `partial`, which is written once `ready`.
  Index reduce_here(std::span<const Slice> all, const Slice& partial, Index ready, Index turn);
  // Gives each rank of this host the shares of the others.
  void hand_out(std::span<const Slice> all, Index ready, Index turn);
  void swap_sums(std::size_t chunk_bytes);
  // The part of a partial result of `numbers` that belongs to `memory`.
  Slice part_of(const Slice& partial, const Slice& numbers, const Slice& memory) const {
    const auto begin = static_cast<std::size_t>(address(memory) - address(numbers));
    return partial.part(begin * ratio_, memory.bytes * ratio_);
  }
  // Reduces fp32 numbers over the hosts: each host gets one piece of the slice.
  Index reduce_pieces(int slice, std::span<const Slice> pieces, const Slice& wide, Index ready,
                      Index turn);

  Slice slice_of(const Slice& chunk, int slice) const {
    return piece_of(chunk, layout_.slices(), slice);
  }
  // The slices of each rank of this host, by place.
  std::vector<Slice> shares(const Slice& chunk) const;
  // Calls function(slice, memory) for the slices of this rank.
  template <class Function>
  void for_each_own(const Slice& chunk, const Function& function) const;
  // Calls function(chunk, turn) for the chunks of the memory.
  template <class Function>
  void for_each_chunk(const Slice& memory, std::size_t chunk_bytes, const Function& function);
};

std::vector<Slice> Slices::shares(const Slice& chunk) const {
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

Index Slices::reduce_here(std::span<const Slice> all, const Slice& partial, Index ready,
                          Index turn) {
  const Slice& mine = all[static_cast<std::size_t>(place_)];
  if (is_alone()) return widens_ ? widen(mine, partial) : Plan::kNone;
  Job sum = on_host(Kind::ReduceScatter);
  sum.inputs = all;
  sum.data = partial;
  sum.precision = first();
  return add(mates_, sum, {Algorithm::Blocks, kWhole}, ready, turn);
}

template <class Function>
void Slices::for_each_own(const Slice& chunk, const Function& function) const {
  const int end = layout_.first_slice(host_, place_ + 1);
  for (int slice = layout_.first_slice(host_, place_); slice < end; ++slice) {
    if (const Slice memory = slice_of(chunk, slice); memory.bytes > 0) function(slice, memory);
  }
}

template <class Function>
void Slices::for_each_chunk(const Slice& memory, std::size_t chunk_bytes,
                            const Function& function) {
  const std::size_t chunks =
      std::max<std::size_t>(1, (memory.bytes + chunk_bytes - 1) / chunk_bytes);
  in_turn(chunks, [&](std::size_t k, Index turn) {
    const std::size_t begin = k * chunk_bytes;
    function(memory.part(begin, std::min(chunk_bytes, memory.bytes - begin)), turn);
  });
}

Index Slices::reduce_pieces(int slice, std::span<const Slice> pieces, const Slice& wide,
                            Index ready, Index turn) {
  std::vector<Slice> inputs;
  std::size_t begin = 0;
  for (const Slice& piece : pieces) {
    inputs.push_back(wide.part(begin, piece.bytes * ratio_));
    begin += piece.bytes * ratio_;
  }
  Job sum = between_hosts(Kind::ReduceScatter);
  sum.inputs = inputs;
  sum.data = pieces[static_cast<std::size_t>(host_)];
  sum.averaged = job_.ranks;
  sum.precision = last();
  return add(layout_.owners(slice), sum, {Algorithm::Blocks, kWhole}, ready, turn);
}

void Slices::all_reduce(std::size_t chunk_bytes) {
  if (layout_.hosts() == 2 && !widens_) return swap_sums(chunk_bytes);
  // Not Halving: it waits for one peer before it receives from the next, so two slices or chunks
  // between the same ranks could wait for each other.
  const Choice choice{layout_.hosts() < kManyHosts ? Algorithm::Blocks : Algorithm::Ring, kWhole};
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    const auto all = shares(chunk);
    const Slice& mine = all[static_cast<std::size_t>(place_)];
    const Slice partial = widens_ ? partial_of(mine) : mine;
    const Index summed = reduce_here(all, partial, Plan::kNone, turn);
    const Index first_step = plan_.next();
    for_each_own(chunk, [&](int slice, const Slice& memory) {
      if (widens_) {
        const auto pieces = pieces_of(memory, layout_.hosts());
        const Slice wide = part_of(partial, mine, memory);
        const Index here = reduce_pieces(slice, pieces, wide, summed, turn);
        Job result = between_hosts(Kind::AllGather);
        result.data = pieces[static_cast<std::size_t>(host_)];
        result.outputs = pieces;
        add(layout_.owners(slice), result, {Algorithm::Direct, kWhole}, here, turn);
        return;
      }
      Job exchange = between_hosts(Kind::AllReduce);
      exchange.data = memory;
      exchange.averaged = job_.ranks;
      add(layout_.owners(slice), exchange, choice, summed, turn);
    });
    hand_out(all, plan_.all_since(first_step, summed, /*with_sends=*/false), turn);
  });
}

// Two hosts send each other their sums: as many bytes as in halves whose results go back, in one
// trip. A sum waits to be sent while the result is written already, so it has memory of its own,
// which a later chunk uses again when this one has ended.
void Slices::swap_sums(std::size_t chunk_bytes) {
  std::array<Slice, kChunksUnderWay> spare;
  std::size_t k = 0;
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    const auto all = shares(chunk);
    const Slice& mine = all[static_cast<std::size_t>(place_)];
    Slice& memory_of_sum = spare[k++ % kChunksUnderWay];
    if (memory_of_sum.bytes < mine.bytes)
      memory_of_sum = slice_at(plan_.scratch(mine.bytes, scratch_), mine.bytes);
    const Slice sum = memory_of_sum.part(0, mine.bytes);
    Index summed = turn;
    if (is_alone()) {
      summed = plan_.copy(address(sum), address(mine), mine.bytes);
      plan_.after(turn, summed);
    } else {
      summed = reduce_here(all, sum, turn, turn);
    }
    const Index first_step = plan_.next();
    for_each_own(chunk, [&](int slice, const Slice& memory) {
      Job exchange = between_hosts(Kind::AllReduce);
      exchange.data = memory;
      exchange.from = address(part_of(sum, mine, memory));
      exchange.averaged = job_.ranks;
      add(layout_.owners(slice), exchange, {Algorithm::Direct}, summed, turn);
    });
    hand_out(all, plan_.all_since(first_step, summed, /*with_sends=*/false), turn);
  });
}

void Slices::hand_out(std::span<const Slice> all, Index ready, Index turn) {
  if (is_alone()) return;
  Job result = on_host(Kind::AllGather);
  result.data = all[static_cast<std::size_t>(place_)];
  result.outputs = all;
  add(mates_, result, {Algorithm::Direct, kWhole}, ready, turn);
}

// On root's host all ranks get a chunk; each sends its slice to the other hosts.
void Slices::broadcast(std::size_t chunk_bytes) {
  const bool is_first = host_ == root_host();
  const Choice within{members() > 2 ? Algorithm::Blocks : Algorithm::Direct, kWhole};
  const Choice between{layout_.hosts() > 2 ? Algorithm::Blocks : Algorithm::Direct, kWhole};
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    Index ready = Plan::kNone;
    if (is_first && !is_alone()) {
      Job own = on_host(Kind::Broadcast);
      own.data = chunk;
      own.call.root = layout_.place_of(job_.call.root);
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
    if (!is_first) hand_out(shares(chunk), ready, turn);
  });
}

void Slices::reduce(std::size_t chunk_bytes) {
  const Choice choice{layout_.hosts() > 2 ? Algorithm::Blocks : Algorithm::Direct, kWhole};
  const bool is_root = job_.rank == job_.call.root;
  for_each_chunk(job_.data, chunk_bytes, [&](const Slice& chunk, Index turn) {
    const auto all = shares(chunk);
    const Slice& mine = all[static_cast<std::size_t>(place_)];
    // Only root's bytes may change.
    const bool keeps = !is_root && (widens_ || !is_alone());
    const Slice out = keeps ? slice_at(plan_.scratch(mine.bytes, scratch_), mine.bytes) : mine;
    const Slice partial = widens_ ? partial_of(mine) : out;
    const Index summed = reduce_here(all, partial, Plan::kNone, turn);
    const Index first_step = plan_.next();
    for_each_own(chunk, [&](int slice, const Slice& memory) {
      const auto begin = static_cast<std::size_t>(address(memory) - address(mine));
      const Slice result = out.part(begin, memory.bytes);
      if (widens_) {
        const auto pieces = pieces_of(result, layout_.hosts());
        const Slice wide = part_of(partial, mine, memory);
        const Index here = reduce_pieces(slice, pieces, wide, summed, turn);
        Job gather = between_hosts(Kind::Gather);
        gather.data = pieces[static_cast<std::size_t>(host_)];
        gather.outputs = pieces;
        gather.call.root = root_host();
        add(layout_.owners(slice), gather, {Algorithm::Direct}, here, turn);
        return;
      }
      Job exchange = between_hosts(Kind::Reduce);
      exchange.data = result;
      exchange.call.root = root_host();
      exchange.averaged = job_.ranks;
      add(layout_.owners(slice), exchange, choice, summed, turn);
    });
    const Index ready = plan_.all_since(first_step, summed, /*with_sends=*/false);
    if (host_ != root_host() || is_alone()) return;
    Job result = on_host(Kind::Gather);
    result.data = out;
    result.outputs = all;
    result.call.root = layout_.place_of(job_.call.root);
    add(mates_, result, {Algorithm::Direct}, ready, turn);
  });
}

}  // namespace

void append_in_slices(Plan& plan, const Job& job, std::size_t chunk_bytes, Scratch& scratch) {
  Slices slices(plan, job, scratch);
  if (job.call.kind == Kind::Broadcast) return slices.broadcast(chunk_bytes);
  if (job.call.kind == Kind::Reduce) return slices.reduce(chunk_bytes);
  slices.all_reduce(chunk_bytes);
}

}  // namespace weft::transport::mesh
