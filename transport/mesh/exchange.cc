// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/transport/mesh/levels.h>

namespace weft::transport::mesh {

namespace {

using Index = Plan::Index;

// For each other host one rank of this host leads: it collects the parts that its host sends there,
// swaps them with the leader there in one message each way, and gives each rank of its host the
// parts for it. A block consists of one rank's parts for one host, or from it. The ranks of a host
// take turns in leading, so each has few connections to other hosts.
class Exchange : Levels {
 public:
  Exchange(Plan& plan, const Job& job, Scratch& scratch)
      : Levels(plan, job, scratch), part_bytes_(job.inputs.front().bytes) {}
  void all_to_all();

 private:
  // The rank of a host that leads for another host.
  int leader(int host, int other) const {
    const auto& ranks = layout_.ranks_on(host);
    return ranks[static_cast<std::size_t>(other > host ? other - 1 : other) % ranks.size()];
  }
  // Both of these add the steps for one other host.
  void lead(int other);
  void follow(int other);
  std::size_t block_bytes(int other) const { return layout_.ranks_on(other).size() * part_bytes_; }
  // Copies this rank's block for a host. The plan is written when the inputs may be read.
  void pack(int other, std::byte* block) const;
  // Memory of the plan. Blocks are small and many, so they share larger ones of the pool.
  std::byte* take(std::size_t bytes);
  const Slice& input(int rank) const { return job_.inputs[static_cast<std::size_t>(rank)]; }
  const Slice& output(int rank) const { return job_.outputs[static_cast<std::size_t>(rank)]; }

  const std::size_t part_bytes_;
  Slice free_;
};

std::byte* Exchange::take(std::size_t bytes) {
  if (free_.bytes < bytes) {
    const std::size_t more = std::max<std::size_t>(bytes, 64 << 10);
    free_ = slice_at(plan_.scratch(more, scratch_), more);
  }
  std::byte* const taken = address(free_);
  free_ = free_.part(bytes, free_.bytes - bytes);
  return taken;
}

void Exchange::all_to_all() {
  for_each_mate_in_turn([&](int mate) {
    plan_.send(mate, address(input(mate)), part_bytes_);
    plan_.receive(mate, address(output(mate)), part_bytes_);
  });
  for (int step = 1; step < layout_.hosts(); ++step) {
    const int other = (host_ + step) % layout_.hosts();
    leader(host_, other) == job_.rank ? lead(other) : follow(other);
  }
  const Slice &own = output(job_.rank), &from = input(job_.rank);
  if (own.data != from.data) plan_.copy(address(own), address(from), part_bytes_);
}

void Exchange::pack(int other, std::byte* block) const {
  if (part_bytes_ == 0) return;
  for (const int rank : layout_.ranks_on(other)) {
    std::memcpy(block, address(input(rank)), part_bytes_);
    block += part_bytes_;
  }
}

void Exchange::follow(int other) {
  const std::size_t bytes = block_bytes(other);
  const int leads = leader(host_, other);
  std::byte* const sent = take(bytes);
  pack(other, sent);
  plan_.send(leads, sent, bytes);
  std::byte* part = take(bytes);
  const Index come = plan_.receive(leads, part, bytes);
  for (const int rank : layout_.ranks_on(other)) {
    plan_.after(come, plan_.copy(address(output(rank)), part, part_bytes_));
    part += part_bytes_;
  }
}

void Exchange::lead(int other) {
  const std::size_t bytes = block_bytes(other);
  const std::size_t whole = bytes * mates_.size();
  // Blocks by the place of the rank that sends; so the parts for one rank do not lie together.
  std::byte* const sent = take(whole);
  const auto block_of = [&](int mate) {
    return sent + static_cast<std::size_t>(layout_.place_of(mate)) * bytes;
  };
  pack(other, block_of(job_.rank));
  const Index first = plan_.next();
  for_each_mate_in_turn([&](int mate) { plan_.receive(mate, block_of(mate), bytes); });
  const Index gathered = plan_.all_since(first, Plan::kNone, /*with_sends=*/false);
  const int peer = leader(other, host_);
  plan_.after(gathered, plan_.send(peer, sent, whole));

  std::byte* const received = take(whole);
  const Index come = plan_.receive(peer, received, whole);
  const auto& far = layout_.ranks_on(other);
  const auto part_of = [&](std::size_t from, int to) {
    const auto place = static_cast<std::size_t>(layout_.place_of(to));
    return received + (from * mates_.size() + place) * part_bytes_;
  };
  for_each_mate_in_turn([&](int mate) {
    std::byte* const block = take(bytes);
    const Index first_copy = plan_.next();
    for (std::size_t from = 0; from < far.size(); ++from) {
      plan_.after(come, plan_.copy(block + from * part_bytes_, part_of(from, mate), part_bytes_));
    }
    const Index copied = plan_.all_since(first_copy, Plan::kNone, /*with_sends=*/false);
    plan_.after(copied, plan_.send(mate, block, bytes));
  });
  for (std::size_t from = 0; from < far.size(); ++from) {
    plan_.after(come,
                plan_.copy(address(output(far[from])), part_of(from, job_.rank), part_bytes_));
  }
}

}  // namespace

void append_exchange(Plan& plan, const Job& job, Scratch& scratch) {
  Exchange(plan, job, scratch).all_to_all();
}

}  // namespace weft::transport::mesh
