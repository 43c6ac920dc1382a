// SPDX-License-Identifier: Apache-2.0
// Each pair of ranks chooses its transport by the addresses that the ranks have published. Ranks
// are threads here; each has a store of its own, which shows it some of the addresses as if those
// ranks were on another host, or had no shm.
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/tests/harness/interface.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/transport/mesh/table.h>
#include <weft/transport/registry.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::transport {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr auto kLong = std::chrono::seconds(60);
constexpr int kRanks = 4;

// Returns an address of the rank `whose`, as the rank `viewer` sees it.
using View = std::function<std::string(int viewer, int whose, const std::string& address)>;

// All ranks' stores share this.
struct Published {
  harness::MemoryBootstrap store;
  std::string secret;  // of all ranks
  std::mutex mutex;
  std::map<int, std::string> addresses;  // as they were published
  std::vector<std::string> keys;
  Bootstrap::Bytes published_table;

  std::string address_of(int rank) {
    std::lock_guard lock(mutex);
    return addresses.at(rank);
  }
  Bootstrap::Bytes table() {
    std::lock_guard lock(mutex);
    return published_table;
  }
  std::vector<std::string> left() {
    std::lock_guard lock(mutex);
    std::vector<std::string> found;
    for (const auto& key : keys) {
      if (store.exists(key)) found.push_back(key);
    }
    return found;
  }
};

// The store as one rank sees it.
class StoreOfRank final : public Bootstrap {
 public:
  StoreOfRank(int rank, std::shared_ptr<Published> published, View view)
      : rank_(rank), published_(std::move(published)), view_(std::move(view)) {
    below_ = {published_, &published_->store};
    if (!published_->secret.empty())
      below_ = std::make_shared<SignedBootstrap>(below_, published_->secret, "test");
  }

  void set(const std::string& key, const Bytes& value) override {
    {
      std::lock_guard lock(published_->mutex);
      published_->keys.push_back(key);
      if (key == "mesh/table") published_->published_table = value;
      if (key.starts_with(kAddress)) {
        published_->addresses[std::stoi(key.substr(kAddress.size()))] =
            mesh::decode_address(value).value();
      }
    }
    below_->set(key, value);
  }
  Bytes get(const std::string& key, Deadline deadline) override {
    const Bytes value = below_->get(key, deadline);
    if (!view_) return value;
    if (key.starts_with(kAddress)) {
      const int whose = std::stoi(key.substr(kAddress.size()));
      return mesh::encode_address(view_(rank_, whose, published_->address_of(whose)));
    }
    auto table = mesh::decode_table(value, kRanks);
    if (key != "mesh/table" || !table) return value;
    for (int whose = 0; whose < kRanks; ++whose)
      table.value().addresses[static_cast<std::size_t>(whose)] =
          view_(rank_, whose, published_->address_of(whose));
    return mesh::encode(table.value());
  }
  long add(const std::string& key, long amount) override { return below_->add(key, amount); }
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return below_->compare_set(key, expected, desired);
  }
  bool exists(const std::string& key) override { return below_->exists(key); }
  void erase(const std::string& key) override { below_->erase(key); }

 private:
  static constexpr std::string_view kAddress = "mesh/address/";
  const int rank_;
  const std::shared_ptr<Published> published_;
  const View view_;
  std::shared_ptr<Bootstrap> below_;
};

JoinOptions options_of(int rank, int ranks, const std::shared_ptr<Bootstrap>& store,
                       std::chrono::milliseconds timeout = kLong) {
  JoinOptions options;
  options.rank = rank;
  options.size = ranks;
  options.group_name = "test";
  options.store = store;
  options.timeout = timeout;
  options.loop = std::make_shared<EventLoop>("rank " + std::to_string(rank));
  options.interface_address = harness::interface_or("127.0.0.1");
  return options;
}

// One rank's report about its communicator.
struct Told {
  std::string backend;
  std::vector<std::string> before;  // the transport to each peer, before any but joining
  std::vector<std::string> after;   // and after each pair has exchanged a number
  std::vector<float> received;
};

std::vector<std::string> transports_of(const Communicator& communicator) {
  std::vector<std::string> names;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    if (peer != communicator.rank()) names.push_back(communicator.transport(peer));
  }
  return names;
}

// Joins kRanks ranks, which all exchange numbers.
std::vector<Told> exchange(
    const View& view, const std::shared_ptr<Published>& published = std::make_shared<Published>()) {
  std::vector<Told> told(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Told& mine = told[static_cast<std::size_t>(rank)];
      try {
        const auto store = std::make_shared<StoreOfRank>(rank, published, view);
        JoinOptions options = options_of(rank, kRanks, store);
        options.secret = published->secret;
        const auto communicator = open("weft")->join(options);
        mine.backend = communicator->backend();
        mine.before = transports_of(*communicator);
        std::vector<float> numbers(kRanks, static_cast<float>(rank));
        mine.received.resize(kRanks);
        std::vector<Slice> from, to;
        for (std::size_t peer = 0; peer < kRanks; ++peer) {
          from.push_back({&numbers[peer], sizeof(float), Device::host()});
          to.push_back({&mine.received[peer], sizeof(float), Device::host()});
        }
        const Op op = communicator->all_to_all(to, from, Dtype::Float32, Pin(), Fence());
        EXPECT_TRUE(op.done().synchronize(Deadline::in(kLong)));
        EXPECT_FALSE(op.error()) << op.error()->what();
        mine.after = transports_of(*communicator);
        std::vector<float> sums(100'000, static_cast<float>(rank));
        const Op sum = communicator->all_reduce(
            {{sums.data(), sums.size() * sizeof(float), Device::host()}, Dtype::Float32},
            ReduceOp::Sum, Pin(), Fence());
        EXPECT_TRUE(sum.done().synchronize(Deadline::in(kLong)));
        EXPECT_THAT(sums, Each(0 + 1 + 2 + 3));
        std::fill(mine.received.begin(), mine.received.end(), -1);
        const Op gathered = communicator->run({.kind = CollectiveKind::AllToAll,
                                               .dtype = Dtype::Float32,
                                               .inputs = from,
                                               .outputs = to,
                                               .has_equal_parts = true},
                                              Pin(), Fence());
        EXPECT_TRUE(gathered.done().synchronize(Deadline::in(kLong)));
        published->store.set("end/" + std::to_string(rank), {});  // none closes before all have
        for (int other = 0; other < kRanks; ++other)
          published->store.get("end/" + std::to_string(other), Deadline::in(kLong));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        published->store.set("end/" + std::to_string(rank), {});
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Told& one : told) EXPECT_THAT(one.received, ElementsAre(0, 1, 2, 3));
  return told;
}

// Moves the address to another host, as far as shm sees it.
std::string elsewhere(std::string address) {
  const auto at = address.find("shm ");
  if (at == std::string::npos) return address;
  const auto begin = at + 4;
  return address.replace(begin, address.find('/', begin) - begin,
                         "00000000-0000-0000-0000-000000000000");
}

// The shm address of a listener that is gone: nothing tells before connecting.
std::string without_listener(std::string address) {
  const auto at = address.find("shm ");
  if (at == std::string::npos) return address;
  const auto end = address.find('\n', at);
  const auto begin = address.rfind('/', end) + 1;
  return address.replace(begin, end - begin, "999999");
}

std::string without_shm(const std::string& address) {
  const auto at = address.find("shm ");
  return at == std::string::npos ? address
                                 : address.substr(0, at) + address.substr(address.find('\n') + 1);
}

TEST(WeftBackend, RanksOfOneHostUseShm) {
  for (const Told& one : exchange(nullptr)) {
    EXPECT_EQ(one.backend, "shm");
    EXPECT_THAT(one.before, Each("shm"));
    EXPECT_THAT(one.after, Each("shm"));
  }
}

TEST(WeftBackend, PairsOfTwoHostsUseTcpAndTheOthersShm) {
  const auto told = exchange([](int viewer, int whose, const std::string& address) {
    return viewer / 2 == whose / 2 ? address : elsewhere(address);
  });
  for (const Told& one : told) EXPECT_EQ(one.backend, "weft");
  for (const auto& shown : {&Told::before, &Told::after}) {
    EXPECT_THAT(told[0].*shown, ElementsAre("shm", "tcp", "tcp"));
    EXPECT_THAT(told[1].*shown, ElementsAre("shm", "tcp", "tcp"));
    EXPECT_THAT(told[2].*shown, ElementsAre("tcp", "tcp", "shm"));
    EXPECT_THAT(told[3].*shown, ElementsAre("tcp", "tcp", "shm"));
  }
}

TEST(WeftBackend, PairsProveTheSecretOverAnyTransport) {
  const auto published = std::make_shared<Published>();
  published->secret = "sixteen at random";
  const auto told = exchange(
      [](int viewer, int whose, const std::string& address) {
        return viewer / 2 == whose / 2 ? address : elsewhere(address);
      },
      published);
  EXPECT_THAT(told[0].after, ElementsAre("shm", "tcp", "tcp"));
  EXPECT_THAT(told[2].after, ElementsAre("tcp", "tcp", "shm"));
}

TEST(WeftBackend, RankZeroTellsAllRanksTheirHosts) {
  const auto hosts_of = [](const View& view) {
    const auto published = std::make_shared<Published>();
    exchange(view, published);
    const auto table = mesh::decode_table(published->table(), kRanks);
    EXPECT_TRUE(table);
    return table ? table.value().hosts : std::vector<std::uint32_t>();
  };
  EXPECT_THAT(hosts_of(nullptr), Each(0));
  EXPECT_THAT(hosts_of([](int, int whose, const std::string& address) {
                return whose % 2 == 0 ? address : elsewhere(address);
              }),
              ElementsAre(0, 1, 0, 1));
  // A host that is not known makes all collectives flat.
  EXPECT_THAT(
      hosts_of([](int, int whose, const std::string& address) {
        return whose == 1 ? without_shm(address) : whose == 2 ? elsewhere(address) : address;
      }),
      Each(0));
}

TEST(WeftBackend, PairsOfARankWithoutShmUseTcp) {
  const auto told = exchange([](int viewer, int whose, const std::string& address) {
    return viewer == 1 || whose == 1 ? without_shm(address) : address;
  });
  EXPECT_EQ(told[1].backend, "tcp");
  EXPECT_THAT(told[0].after, ElementsAre("tcp", "shm", "shm"));
  EXPECT_THAT(told[1].after, Each("tcp"));
  EXPECT_THAT(told[3].after, ElementsAre("shm", "tcp", "shm"));
}

// The host is the same, and its processes do not see each other.
TEST(WeftBackend, ReasonForTcpWithinAHostIsSaidOnce) {
  std::mutex mutex;
  std::vector<std::string> lines;
  const log::Capture capture([&](LogLevel, std::string_view text) {
    std::lock_guard lock(mutex);
    if (text.find("passed over") != std::string_view::npos) lines.emplace_back(text);
  });
  const auto told = exchange([](int viewer, int whose, std::string address) {
    if (viewer == whose) return address;
    const auto slash = address.find('/', address.find("shm "));
    return address.replace(slash + 1, address.find('/', slash + 1) - slash - 1, "1");
  });
  for (const Told& one : told) EXPECT_THAT(one.after, Each("tcp"));
  static bool is_known = false;  // the tests of one process may be repeated
  std::lock_guard lock(mutex);
  EXPECT_THAT(lines, testing::Contains(AllOf(HasSubstr("'shm' is passed over for 'tcp'"),
                                             HasSubstr("the process namespaces differ")))
                         .Times(std::exchange(is_known, true) ? 0 : 1));
}

TEST(WeftBackend, PairsWhoseShmFailsUseTcp) {
  std::mutex mutex;
  std::vector<std::string> lines;
  const log::Capture capture([&](LogLevel, std::string_view text) {
    std::lock_guard lock(mutex);
    if (text.find("it has failed") != std::string_view::npos) lines.emplace_back(text);
  });
  const auto told = exchange([](int viewer, int whose, const std::string& address) {
    return viewer / 2 == whose / 2 ? address : without_listener(address);
  });
  EXPECT_THAT(told[0].after, ElementsAre("shm", "tcp", "tcp"));
  EXPECT_THAT(told[1].after, ElementsAre("shm", "tcp", "tcp"));
  EXPECT_THAT(told[2].after, ElementsAre("tcp", "tcp", "shm"));
  EXPECT_THAT(told[3].after, ElementsAre("tcp", "tcp", "shm"));
  static bool is_known = false;  // the tests of one process may be repeated
  std::lock_guard lock(mutex);
  EXPECT_THAT(lines, testing::Contains(AllOf(HasSubstr("'shm' is passed over for 'tcp'"),
                                             HasSubstr("does not listen any more")))
                         .Times(std::exchange(is_known, true) ? 0 : 1));
}

// The user has chosen it.
TEST(WeftBackend, ShmThatIsForcedAndFailsIsAnError) {
  const auto published = std::make_shared<Published>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto store = std::make_shared<StoreOfRank>(
          rank, published, [rank](int, int whose, const std::string& address) {
            return whose == rank ? address : address.substr(0, address.rfind('/') + 1) + "999999";
          });
      try {
        open("shm")->join(options_of(rank, kRanks, store));
        ADD_FAILURE() << "rank " << rank << " has joined";
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(WeftBackend, RefusesAnAddressOfGarbageByName) {
  for (const std::string garbage : {"", "garbage", "shm", "shm \n", "SHM 1/2/3/4\n", "shm a b\n"}) {
    const auto published = std::make_shared<Published>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const auto store = std::make_shared<StoreOfRank>(
            rank, published, [&](int, int whose, const std::string& address) {
              return whose == 1 ? garbage : address;
            });
        try {
          open("weft")->join(options_of(rank, 2, store, std::chrono::milliseconds(500)));
          ADD_FAILURE() << "rank " << rank << " joined with '" << garbage << "'";
        } catch (const Error& error) {
          if (rank == 1) return;  // it has an address that it can read, and waits
          EXPECT_EQ(error.blame(), Blame::Unsupported) << error.what();
          EXPECT_THAT(error.text(), HasSubstr("this rank cannot reach rank 1"));
          EXPECT_THAT(error.ranks(), ElementsAre(1));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(WeftBackend, LeavesNothingOfItsOwnInTheStore) {
  const auto published = std::make_shared<Published>();
  exchange(nullptr, published);
  EXPECT_THAT(published->left(), testing::IsEmpty());
}

TEST(WeftBackend, NamesTheMissingRanks) {
  for (const int rank : {0, 1}) {
    const auto store = std::make_shared<StoreOfRank>(rank, std::make_shared<Published>(), nullptr);
    if (rank != 0) store->set("mesh/address/0", mesh::encode_address("it came, and no more"));
    try {
      open("weft")->join(options_of(rank, 4, store, std::chrono::milliseconds(100)));
      FAIL() << "it joined alone";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Timeout);
      const char* const missing = rank == 0 ? "missing: ranks 1, 2, 3" : "missing: ranks 2, 3";
      EXPECT_THAT(error.text(),
                  AllOf(HasSubstr("on group 'test' (weft, rank"), HasSubstr(missing)));
    }
  }
}

TEST(WeftBackend, JoinsAloneWithoutAStore) {
  const auto alone = open("weft")->join(options_of(0, 1, nullptr));
  EXPECT_EQ(alone->size(), 1);
  EXPECT_EQ(alone->backend(), "weft");
  EXPECT_TRUE(alone->barrier(Fence()).done().synchronize(Deadline::in(kLong)));
}

}  // namespace
}  // namespace weft::transport
