// SPDX-License-Identifier: Apache-2.0
// Machines that do not answer, on the loopback: a listening socket whose queue is full and from
// which nobody accepts drops every further connection, as a cable that was cut does.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/silent_machines.h>
#include <weft/engine/membership/still_listens.h>
#include <weft/tests/engine/membership/ports.h>

namespace {

std::mutex mutex;
std::multiset<int> dialled;  // ports

}  // namespace

// The libraries that this program loads call this one.
extern "C" int connect(int socket, const sockaddr* there, socklen_t bytes) {
  if (there->sa_family == AF_INET) {
    const std::lock_guard lock(mutex);
    dialled.insert(ntohs(reinterpret_cast<const sockaddr_in*>(there)->sin_port));
  }
  return static_cast<int>(::syscall(SYS_connect, socket, there, bytes));
}

namespace weft::group {
namespace {

constexpr std::chrono::seconds kLimit{120};
constexpr int kRanks = 9;

std::multiset<int> dialled_so_far() {
  const std::lock_guard lock(mutex);
  return dialled;
}

class SilentMachine {
 public:
  explicit SilentMachine(const std::string& host) : port_(open_port(host, kRanks, 0)) {
    while (!is_full()) filling_.push_back(dial_socket(port_.address));
  }
  const Published& address() const { return port_.address; }

 private:
  bool is_full() const {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    EXPECT_EQ(::getsockopt(port_.socket.get(), IPPROTO_TCP, TCP_INFO, &info, &bytes), 0);
    return info.tcpi_unacked > info.tcpi_sacked;  // connections in the queue, and its limit
  }

  const Port port_;
  std::vector<Descriptor> filling_;
};

std::string host(int number) { return "127.0.0." + std::to_string(number + 2); }

bool comes(const Descriptor& socket) {
  pollfd one{socket.get(), POLLIN, 0};
  return ::poll(&one, 1, static_cast<int>(std::chrono::milliseconds(kLimit).count())) == 1;
}

// Accepts connections until a rank says hello on one.
Descriptor accept_hello(const Port& port) {
  while (comes(port.socket)) {
    Descriptor socket(::accept4(port.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    char byte = 0;
    if (::recv(socket.get(), &byte, 1, MSG_PEEK) == 1) return socket;
  }
  ADD_FAILURE() << "nobody says hello at " << port.address.host;
  return {};
}

// Rank 7 of 9. It hears that rank 0, its parent, is behind a cable that was cut, as are ranks 1 to
// 4, which would be its parent next; rank 5 is not. Rank 6 is behind the cable too.
TEST(SilentMachines, AreAskedAtOnce) {
  std::map<int, std::unique_ptr<SilentMachine>> silent;
  for (const int rank : {0, 1, 2, 3, 4, 6})
    silent[rank] = std::make_unique<SilentMachine>(host(rank));
  const Port fifth = open_port(host(5), kRanks);
  std::map<int, Published> addresses{{5, fifth.address}};
  for (const auto& [rank, machine] : silent) addresses[rank] = machine->address();

  const auto loop = std::make_shared<EventLoop>("rank 7");
  std::optional<std::multiset<int>> before_loss;  // the ports dialled until rank 1 was lost
  std::atomic<bool> is_placed{false};
  std::weak_ptr<Neighbours> weak;
  Port own = open_port("127.0.0.1", kRanks);
  const Published address = own.address;
  auto rank = std::make_shared<Neighbours>(
      loop, 7, address, std::move(own.socket), "",
      Neighbours::Events{[&](const Frame& frame) {
                           if (frame.type == FrameType::Lost && frame.rank != 0 && !before_loss)
                             before_loss = dialled_so_far();
                         },
                         [&] {
                           const auto self = weak.lock();
                           is_placed = self && self->is_placed();
                         }});
  weak = rank;
  loop->post([rank, &addresses] {
    rank->start();
    rank->settle(addresses);
  });
  const Descriptor eighth = dial_and_wait(address);
  write_frame(eighth, {FrameType::Hello, 8, 0, "", address.token});
  write_frame(eighth, {FrameType::Lost, 0, kCut, "", "its machine does not answer"});

  const Descriptor child = accept_hello(fifth);
  write_frame(child, {FrameType::Hello, 5, 0, "", ""});
  ASSERT_TRUE(loop->drive([&] { return is_placed.load(); }, Deadline::in(kLimit)));
  std::map<int, std::string> lost;
  std::atomic<bool> is_done{false};
  loop->post([&, rank = std::exchange(rank, nullptr)] {
    lost = rank->known().lost();
    is_done = true;
  });
  loop->drive([&] { return is_done.load(); });
  std::vector<int> ranks;
  for (const auto& [who, how] : lost) ranks.push_back(who);
  // Rank 7 had no need to reach rank 6: others may.
  EXPECT_THAT(ranks, testing::ElementsAre(0, 1, 2, 3, 4));
  ASSERT_TRUE(before_loss);
  for (int one = 1; one < 7; ++one) EXPECT_TRUE(before_loss->contains(addresses[one].port)) << one;
}

TEST(SilentMachines, AtMost64AreAskedAtOnce) {
  std::vector<std::unique_ptr<SilentMachine>> machines;
  std::vector<Published> addresses;
  for (int i = 0; i < 65; ++i) {
    machines.push_back(std::make_unique<SilentMachine>(host(i)));
    addresses.push_back(machines.back()->address());
  }
  const auto before = dialled_so_far().size();
  const auto loop = std::make_shared<EventLoop>("asks");
  std::atomic<std::size_t> after{0};
  loop->post([&] {
    const auto silent = std::make_shared<SilentMachines>(loop);
    silent->ask(addresses);
    silent->ask(addresses);  // they are being asked
    after = dialled_so_far().size();
  });
  loop->drive([&] { return after > 0; });
  EXPECT_EQ(after - before, 64U);
}

// Processes that end when the last of them has been asked.
TEST(StillListen, AsksAllAtOnce) {
  std::vector<Port> ports;
  std::vector<Published> addresses;
  for (int i = 0; i < 8; ++i) {
    ports.push_back(open_port("127.0.0.1", kRanks));
    addresses.push_back(ports.back().address);
  }
  std::thread processes([&] {
    std::vector<Descriptor> accepted;
    for (const Port& one : ports) {
      if (comes(one.socket))
        accepted.emplace_back(::accept4(one.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    ports.clear();
  });
  const auto listen = still_listen(addresses, Deadline::in(kLimit));
  processes.join();
  EXPECT_THAT(listen, testing::Each(false));
}

TEST(StillListen, ToldApartByTheirMachines) {
  const Port living = open_port("127.0.0.1", kRanks);
  const Published ended = open_port("127.0.0.1", kRanks).address;
  const SilentMachine silent("127.0.0.2");
  const std::vector<Published> all{ended, living.address, silent.address()};
  EXPECT_THAT(still_listen(all, Deadline::in(kLimit)), testing::ElementsAre(false, true, false));
  // If the time is over before a rank is asked, that rank does not count as ended.
  EXPECT_THAT(still_listen(all, Deadline::in(std::chrono::seconds(0))), testing::Each(true));
}

}  // namespace
}  // namespace weft::group
