// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <weft/base/error.h>
#include <weft/transport/mpi/agreement.h>

namespace weft::transport::mpi {

namespace {

// How long to wait for the verdict of a rank that has already decided.
constexpr auto kWriting = std::chrono::seconds(10);

Bootstrap::Bytes to_bytes(const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

}  // namespace

// The verdict is decided once: the last rank to arrive decides that all begin, or the first rank
// whose deadline passes decides that none does.
void agree_to_begin(Bootstrap& store, int rank, int ranks, Deadline deadline) {
  const auto decide = [&](const std::string& verdict) {
    const bool is_first = store.add("mpi/decided", 1) == 1;
    if (is_first) store.set("mpi/verdict", to_bytes(verdict));
    return is_first;
  };
  if (store.add("mpi/came", 1) == ranks) decide("");
  Bootstrap::Bytes verdict;
  try {
    verdict = store.get("mpi/verdict", deadline);
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    if (decide("rank " + std::to_string(rank) +
               " reached its deadline before all ranks had joined"))
      throw;
    verdict = store.get("mpi/verdict", Deadline::in(kWriting));
  }
  if (verdict.empty()) return;
  throw Error(Blame::Timeout,
              std::string(reinterpret_cast<const char*>(verdict.data()), verdict.size()));
}

}  // namespace weft::transport::mpi
