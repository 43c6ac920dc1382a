// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/engine/call/in_flight.h>

namespace weft::call {

bool BytesInFlight::take_room(std::uint64_t bytes) {
  std::uint64_t taken = taken_;
  do {
    if (most_ != 0 && taken != 0 && taken + bytes > most_) return false;
  } while (!taken_.compare_exchange_weak(taken, taken + bytes));
  return true;
}

bool BytesInFlight::take(std::uint64_t bytes) { return waiting_ == 0 && take_room(bytes); }

void BytesInFlight::take_anyway(std::uint64_t bytes) { taken_ += bytes; }

void BytesInFlight::wait(Turn& turn) {
  std::vector<const void*> come;
  {
    MutexLock lock(mutex_);
    turns_.push_back(&turn);
    ++waiting_;
    come = let_in();
  }
  wake(come);
}

bool BytesInFlight::give_up(Turn& turn) {
  std::vector<const void*> come;
  {
    MutexLock lock(mutex_);
    if (std::erase(turns_, &turn) == 0) return false;
    --waiting_;
    come = let_in();  // a smaller one may have waited behind it
  }
  wake(come);
  return true;
}

void BytesInFlight::give_back(std::uint64_t bytes) {
  taken_ -= bytes;
  if (waiting_ == 0) return;
  std::vector<const void*> come;
  {
    MutexLock lock(mutex_);
    come = let_in();
  }
  wake(come);
}

std::uint64_t BytesInFlight::taken() const { return taken_; }

std::vector<const void*> BytesInFlight::let_in() {
  std::vector<const void*> come;
  while (!turns_.empty() && take_room(turns_.front()->bytes)) {
    Turn& turn = *turns_.front();
    turns_.pop_front();
    --waiting_;
    come.push_back(&turn);
    turn.has_room = true;  // its thread may end it at once
  }
  return come;
}

void BytesInFlight::wake(const std::vector<const void*>& turns) const {
  for (const void* turn : turns) wake_(turn);
}

}  // namespace weft::call
