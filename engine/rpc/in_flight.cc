#include <algorithm>

#include <weft/engine/rpc/in_flight.h>

namespace weft::rpc {

bool BytesInFlight::take(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (!turns_.empty() || !fits(bytes)) return false;
  taken_ += bytes;
  return true;
}

void BytesInFlight::take_anyway(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  taken_ += bytes;
}

void BytesInFlight::wait(Turn& turn) {
  std::vector<const void*> come;
  {
    std::lock_guard lock(mutex_);
    turns_.push_back(&turn);
    come = let_in();
  }
  wake(come);
}

bool BytesInFlight::give_up(Turn& turn) {
  std::vector<const void*> come;
  {
    std::lock_guard lock(mutex_);
    if (std::erase(turns_, &turn) == 0) return false;
    come = let_in();  // a smaller one may have waited behind it
  }
  wake(come);
  return true;
}

void BytesInFlight::give_back(std::uint64_t bytes) {
  std::vector<const void*> come;
  {
    std::lock_guard lock(mutex_);
    taken_ -= bytes;
    come = let_in();
  }
  wake(come);
}

std::uint64_t BytesInFlight::taken() const {
  std::lock_guard lock(mutex_);
  return taken_;
}

std::vector<const void*> BytesInFlight::let_in() {
  std::vector<const void*> come;
  while (!turns_.empty() && fits(turns_.front()->bytes)) {
    Turn& turn = *turns_.front();
    turns_.pop_front();
    taken_ += turn.bytes;
    come.push_back(&turn);
    turn.has_come = true;  // its thread may end it at once
  }
  return come;
}

void BytesInFlight::wake(const std::vector<const void*>& turns) const {
  for (const void* turn : turns) wake_(turn);
}

}  // namespace weft::rpc
