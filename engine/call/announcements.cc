// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/announcements.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/codec/values.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

using Bytes = transport::Bootstrap::Bytes;

// How many announcements stay in the store (some 150 bytes each): more than a worker misses even if
// it is stopped for a long time.
constexpr long kKept = 1 << 16;
// Key that holds the number of the last announcement, or of a slightly earlier one.
constexpr const char* kNumber = "announcements";

std::string key_of(long number) { return "announcement/" + std::to_string(number); }

Announcement read_announcement(const Bytes& bytes) {
  Announcement announcement;
  codec::Reader({}).read({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
                         [&](const msgpack::object& object) { object.convert(announcement); });
  const auto& [standing, worker, generation, why] = announcement;
  if (worker.rank < 0 || worker.rank > kHighestRank || generation < 0 ||
      generation == std::numeric_limits<Generation>::max()) {
    throw Error(Blame::Protocol, "it names no valid worker");
  }
  return announcement;
}

}  // namespace

void announce(transport::Bootstrap& store, const Announcement& announcement) {
  const auto encoded =
      codec::Writer().write([&](codec::Packer& packer) { packer.pack(announcement); });
  const auto* data = reinterpret_cast<const Bytes::value_type*>(encoded.body.data());
  const Bytes bytes(data, data + encoded.body.size());
  long number = announced(store) + 1;
  // compare_set() ensures that no number lacks its announcement, even if a worker is killed here.
  // It need not wake the workers that wait for the key. set() does, so each worker also sets the
  // keys that it finds taken, for workers that were killed before they could.
  for (; !store.compare_set(key_of(number), {}, bytes); ++number) {
    try {
      store.set(key_of(number), value_of(store, key_of(number)));
    } catch (const Error& error) {
      if (error.blame() != Blame::Caller) throw;  // a stranger has written it: all pass it over
    }
  }
  store.set(key_of(number), bytes);
  store.set(kNumber, group::to_bytes(std::to_string(number)));
  if (number > kKept) store.erase(key_of(number - kKept));
}

long announced(transport::Bootstrap& store) {
  const std::string text = group::to_text(value_of(store, kNumber));
  return text.empty() ? 0 : rank_from(text);
}

struct Follower::State {
  const std::shared_ptr<transport::Bootstrap> store;
  long next = 1;
  const Heard heard;
  const std::function<void(const Error&)> lost;
  std::atomic<bool> ends{false};
};

Follower::Follower(std::shared_ptr<transport::Bootstrap> store, long from, Heard heard,
                   std::function<void(const Error&)> lost)
    : state_(new State{.store = std::move(store),
                       .next = from + 1,
                       .heard = std::move(heard),
                       .lost = std::move(lost)}) {
  try {
    thread_ = std::thread([state = state_] {
      pthread_setname_np(pthread_self(), "weft rpc news");
      follow(*state);
    });
  } catch (const std::system_error& error) {
    throw system_error(
        Blame::Busy,
        "cannot start the thread that follows workers which come and go; raise the limit of "
        "threads of this user or container (ulimit -u, pids.max)",
        error.code().value());
  }
}

void Follower::stop() noexcept { state_->ends = true; }

Follower::~Follower() {
  stop();
  // A callback may drop the last reference to the agent, which then destroys this object on its own
  // thread.
  thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

void Follower::follow(State& state) {
  while (!state.ends) {
    Bytes bytes;
    try {
      bytes = state.store->get(key_of(state.next), Deadline::never());
    } catch (const Error& error) {
      if (state.ends) return;
      if (error.blame() == Blame::Timeout)
        continue;  // even the store limits how long one get() waits
      if (error.blame() != Blame::Caller) return state.lost(error);
      log::warn("an announcement in the job's store is passed over: " + error.text());
      ++state.next;
      continue;
    }
    ++state.next;
    try {
      const Announcement announcement = read_announcement(bytes);
      if (!state.ends) state.heard(announcement);
    } catch (const Error& error) {
      log::warn("an announcement in the job's store cannot be read: " + error.text());
    }
  }
}

}  // namespace weft::call
