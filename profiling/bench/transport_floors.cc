// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <weft/base/futex.h>
#include <weft/profiling/bench/transport_on_gpu.h>
#include <weft/profiling/bench/transport_participants.h>
#include <weft/profiling/bench/transport_rounds.h>
#include <weft/profiling/bench/workers.h>

namespace weft::bench {

namespace {

// Memory that both ranks share. Each floor forks its second rank, which dies with it and inherits
// the memory.
template <class Shared>
Shared& share() {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) std::exit(2);
  return *new (memory) Shared();
}

template <class Serve>
void fork_rank_1(const Serve& serve) {
  const pid_t parent = getpid();
  if (fork() != 0) return pin_to_core_of(0);
  pin_to_core_of(1);
  serve([parent] { return getppid() == parent; });
  std::_Exit(0);
}

// --- a flag in shared memory, there and back

struct Flags {
  alignas(64) std::atomic<std::uint64_t> there{0};
  alignas(64) std::atomic<std::uint64_t> back{0};
};

int be_spinning_flag() {
  Flags& flags = share<Flags>();
  fork_rank_1([&](const auto& goes_on) {
    for (std::uint64_t seen = 0; goes_on();) {
      for (int i = 0; i < 100'000; ++i) {
        const std::uint64_t now = flags.there.load(std::memory_order_acquire);
        if (now == seen) continue;
        seen = now;
        flags.back.store(now, std::memory_order_release);
      }
    }
  });
  std::uint64_t round = 0;
  const Participant flag{[&](std::size_t, int count) {
                           std::vector<double> times;
                           for (int i = 0; i < count; ++i) {
                             const double begin = seconds();
                             flags.there.store(++round, std::memory_order_release);
                             while (flags.back.load(std::memory_order_acquire) != round) {
                             }
                             times.push_back(seconds() - begin);
                           }
                           return times;
                         },
                         {}};
  measure_each(flag.round_trips, {8});
  return 0;
}

// --- two processes that copy on one GPU in turn and signal each other by that flag

int be_copies_in_turn() {
  Flags& flags = share<Flags>();
  struct Request {
    alignas(64) std::atomic<std::size_t> bytes{0};
  };
  Request& request = share<Request>();
  fork_rank_1([&](const auto& goes_on) {
    const Participant copies = device_copy();
    for (std::uint64_t seen = 0; goes_on();) {
      for (int i = 0; i < 100'000; ++i) {
        const std::uint64_t now = flags.there.load(std::memory_order_acquire);
        if (now == seen) continue;
        seen = now;
        copies.stream(request.bytes.load(std::memory_order_relaxed), 1);
        flags.back.store(now, std::memory_order_release);
      }
    }
  });
  const Participant copies = device_copy();
  std::uint64_t round = 0;
  const auto turns = [&](std::size_t bytes, int count) {
    std::vector<double> times;
    request.bytes = bytes;
    for (int i = 0; i < count; ++i) {
      const double begin = seconds();
      flags.there.store(++round, std::memory_order_release);
      while (flags.back.load(std::memory_order_acquire) != round) {
      }
      copies.stream(bytes, 1);
      times.push_back(seconds() - begin);
    }
    return times;
  };
  measure_each(turns, kRoundTripSizes);
  return 0;
}

// --- a ring of slots in shared memory, copied into and out of

constexpr std::size_t kSlots = 16;
constexpr std::size_t kSlotBytes = 64 << 10;

struct Slots {
  alignas(64) std::atomic<std::uint64_t> filled{0};
  alignas(64) std::atomic<std::uint64_t> emptied{0};
  // Bytes of a message of the present size.
  alignas(64) std::atomic<std::uint64_t> bytes{0};
  std::array<std::array<std::byte, kSlotBytes>, kSlots> slots;
};

int be_two_copy_ring(const std::string& name) {
  Slots& ring = share<Slots>();
  fork_rank_1([&](const auto& goes_on) {
    // Uses two buffers in turns, as Weft's receiver does.
    std::vector<std::byte> memory(512 << 20, std::byte{1});
    std::size_t message = 0, at = 0, turn = 0;
    for (std::uint64_t taken = 0; goes_on();) {
      for (int i = 0; i < 100'000; ++i) {
        if (ring.filled.load(std::memory_order_acquire) == taken) {
          spin_pause();
          continue;
        }
        if (at == 0) message = ring.bytes.load(std::memory_order_relaxed);
        const std::size_t piece = std::min(message - at, kSlotBytes);
        std::memcpy(&memory[turn * message + at], ring.slots[taken % kSlots].data(), piece);
        at += piece;
        if (at == message) {
          at = 0;
          turn ^= 1;
        }
        ring.emptied.store(++taken, std::memory_order_release);
      }
    }
  });
  std::vector<std::byte> memory(512 << 20, std::byte{1});
  std::uint64_t written = 0;
  const auto put = [&](const std::byte* from, std::size_t bytes) {
    while (written - ring.emptied.load(std::memory_order_acquire) == kSlots) spin_pause();
    std::memcpy(ring.slots[written % kSlots].data(), from, bytes);
    ring.filled.store(++written, std::memory_order_release);
  };
  const Participant two_copies{{},
                               [&](std::size_t bytes, int count) {
                                 ring.bytes = bytes;
                                 const double begin = seconds();
                                 for (int i = 0; i < count; ++i) {
                                   const std::byte* const from =
                                       &memory[static_cast<std::size_t>(i % 2) * bytes];
                                   for (std::size_t at = 0; at < bytes; at += kSlotBytes) {
                                     put(from + at, std::min(bytes - at, kSlotBytes));
                                   }
                                 }
                                 while (ring.emptied.load(std::memory_order_acquire) != written)
                                   spin_pause();
                                 return seconds() - begin;
                               },
                               [&](std::size_t bytes, int count) {
                                 ring.bytes = bytes;
                                 std::vector<double> times;
                                 for (int i = 0; i < count; ++i) {
                                   renew(memory.data(), bytes);
                                   const double begin = seconds();
                                   for (std::size_t at = 0; at < bytes; at += kSlotBytes) {
                                     put(&memory[at], std::min(bytes - at, kSlotBytes));
                                   }
                                   while (ring.emptied.load(std::memory_order_acquire) != written)
                                     spin_pause();
                                   times.push_back(seconds() - begin);
                                 }
                                 return times;
                               }};
  return measure_case(two_copies, name);
}

// --- the receiver copies once, from the sender's memory

struct Lent {
  alignas(64) std::atomic<std::uint64_t> lent{0};  // messages offered so far
  std::atomic<std::uint64_t> bytes{0};
  alignas(64) std::atomic<std::uint64_t> copied{0};
};

int be_one_copy(const std::string& name) {
  Lent& shared = share<Lent>();
  std::vector<std::byte> memory(64 << 20, std::byte{1});
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  fork_rank_1([&, parent = getpid()](const auto& goes_on) {
    std::vector<std::byte> to(64 << 20, std::byte{1});
    for (std::uint64_t seen = 0; goes_on();) {
      for (int i = 0; i < 100'000; ++i) {
        if (shared.lent.load(std::memory_order_acquire) == seen) {
          spin_pause();
          continue;
        }
        const std::size_t bytes = shared.bytes.load(std::memory_order_relaxed);
        const iovec local{to.data(), bytes}, remote{memory.data(), bytes};
        if (::process_vm_readv(parent, &local, 1, &remote, 1, 0) != static_cast<ssize_t>(bytes))
          std::_Exit(2);
        shared.copied.store(++seen, std::memory_order_release);
      }
    }
  });
  std::uint64_t lent = 0;
  const Participant one_copy{{}, {}, [&](std::size_t bytes, int count) {
                               std::vector<double> times;
                               for (int i = 0; i < count; ++i) {
                                 renew(memory.data(), bytes);
                                 const double begin = seconds();
                                 shared.bytes.store(bytes, std::memory_order_relaxed);
                                 shared.lent.store(++lent, std::memory_order_release);
                                 while (shared.copied.load(std::memory_order_acquire) != lent)
                                   spin_pause();
                                 times.push_back(seconds() - begin);
                               }
                               return times;
                             }};
  return measure_case(one_copy, name);
}

int be_memcpy() {
  pin_to_core_of(0);
  std::vector<std::byte> from(256 << 20, std::byte{1}), to(256 << 20, std::byte{2});
  const Participant copy{{}, [&](std::size_t bytes, int count) {
                           const double begin = seconds();
                           for (int i = 0; i < count; ++i) {
                             std::memcpy(to.data(), from.data(), bytes);
                             asm volatile("" ::: "memory");
                           }
                           return seconds() - begin;
                         }};
  measure_stream(copy, {1 << 20, 16 << 20, 64 << 20, 256 << 20});
  return 0;
}

// --- a TCP socket, polled by recv(MSG_DONTWAIT)

void send_all(int socket, const std::byte* from, std::size_t bytes) {
  while (bytes > 0) {
    const auto sent = ::send(socket, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN) std::exit(0);
    if (sent <= 0) continue;
    from += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
}

void receive_all(int socket, std::byte* to, std::size_t bytes) {
  while (bytes > 0) {
    const auto got = ::recv(socket, to, bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) std::exit(0);
    if (got < 0) continue;
    to += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

// Returns both ends of a connection over the loopback interface.
std::array<int, 2> tcp_pair() {
  const int listening = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listening, generic, bytes) != 0 || ::listen(listening, 1) != 0) std::exit(2);
  ::getsockname(listening, generic, &bytes);
  std::array<int, 2> ends{::socket(AF_INET, SOCK_STREAM, 0), -1};
  if (::connect(ends[0], generic, bytes) != 0) std::exit(2);
  ends[1] = ::accept(listening, nullptr, nullptr);
  const int on = 1;
  for (const int end : ends) ::setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::close(listening);
  return ends;
}

// A request of rank 0: `count` messages, each sent back or all answered by one byte.
struct Order {
  std::uint64_t bytes;
  std::uint64_t count;
  std::uint64_t is_echo;
};

int be_raw_socket(const std::string& name) {
  const auto ends = tcp_pair();
  fork_rank_1([&](const auto&) {
    ::close(ends[0]);
    std::vector<std::byte> memory(256 << 20, std::byte{1});
    for (Order order{};;) {
      receive_all(ends[1], reinterpret_cast<std::byte*>(&order), sizeof order);
      for (std::uint64_t i = 0; i < order.count; ++i) {
        receive_all(ends[1], memory.data(), order.bytes);
        if (order.is_echo != 0) send_all(ends[1], memory.data(), order.bytes);
      }
      if (order.is_echo == 0) send_all(ends[1], memory.data(), 1);
    }
  });
  ::close(ends[1]);
  const int socket = ends[0];
  std::vector<std::byte> memory(256 << 20, std::byte{1});
  const auto say = [&](std::size_t bytes, int count, bool is_echo) {
    const Order order{bytes, static_cast<std::uint64_t>(count), is_echo};
    send_all(socket, reinterpret_cast<const std::byte*>(&order), sizeof order);
  };
  const Participant raw{[&](std::size_t bytes, int count) {
                          std::vector<double> times;
                          say(bytes, count, true);
                          for (int i = 0; i < count; ++i) {
                            const double begin = seconds();
                            send_all(socket, memory.data(), bytes);
                            receive_all(socket, memory.data(), bytes);
                            times.push_back(seconds() - begin);
                          }
                          return times;
                        },
                        [&](std::size_t bytes, int count) {
                          say(bytes, count, false);
                          const double begin = seconds();
                          for (int i = 0; i < count; ++i) send_all(socket, memory.data(), bytes);
                          receive_all(socket, memory.data(), 1);
                          return seconds() - begin;
                        }};
  return measure_case(raw, name);
}

}  // namespace

int be_floor(const std::string& which, const std::string& name) {
  if (which == "spinning flag") return be_spinning_flag();
  if (which == "memcpy") return be_memcpy();
  if (which == "two-copy ring") return be_two_copy_ring(name);
  if (which == "one copy") return be_one_copy(name);
  if (which == "raw socket") return be_raw_socket(name);
  if (which == "device copy") return measure_case(device_copy(), name);
  if (which == "copies in turn") return be_copies_in_turn();
  return 2;
}

}  // namespace weft::bench
