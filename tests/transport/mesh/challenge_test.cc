// SPDX-License-Identifier: Apache-2.0
// A group with a secret: ranks that do not know it are named, and strangers are turned away before
// anything else of them is read.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>

#include <weft/base/log.h>
#include <weft/tests/transport/mesh/mesh_ranks.h>
#include <weft/transport/mesh/challenge.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::transport::mesh {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

using Message = std::vector<std::byte>;
const std::string kSecret = "sixteen at random";
const std::string kOther = "sixteen but other";

// Options of a rank, whose store is signed if it has a secret.
JoinOptions guarded(int rank, int size, const std::shared_ptr<Bootstrap>& store,
                    const std::string& secret) {
  JoinOptions options = options_of(rank, size, store);
  options.secret = secret;
  if (!secret.empty()) options.store = std::make_shared<SignedBootstrap>(store, secret, "test");
  return options;
}

// Joins one rank for each secret; returns their errors.
std::vector<std::optional<Error>> join(const std::vector<std::string>& secrets) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const int ranks = static_cast<int>(secrets.size());
  std::vector<std::optional<Error>> errors(secrets.size());
  std::vector<std::shared_ptr<Communicator>> made(secrets.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      try {
        made[at] = join_inproc(guarded(rank, ranks, store, secrets[at]));
      } catch (const Error& error) {
        errors[at] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(MeshSecret, RanksThatShareItReachEachOther) {
  for (const auto& error : join(std::vector<std::string>(5, kSecret)))
    EXPECT_FALSE(error) << error->what();
}

// All pairs connect at their first message, from both sides.
TEST(MeshSecret, RanksThatConnectAtOnceMeet) {
  constexpr int kRanks = 6;
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator = join_inproc(guarded(rank, kRanks, store, kSecret));
        std::vector<int> mine(kRanks, rank), theirs(kRanks, -1);
        const auto of = [](int& one) {
          return Elements{{&one, sizeof one, Device::host()}, Dtype::Int32};
        };
        std::vector<Op> ops;
        for (std::size_t peer = 0; peer < kRanks; ++peer) {
          const int other = static_cast<int>(peer);
          PointToPoint& messages = *communicator->point_to_point();
          ops.push_back(messages.send(of(mine[peer]), other, 0, Pin(), Fence()));
          ops.push_back(messages.recv(of(theirs[peer]), other, 0, Pin(), Fence()));
        }
        for (const Op& op : ops) expect_done(op, "a message");
        EXPECT_THAT(theirs, testing::ElementsAre(0, 1, 2, 3, 4, 5));
        store->set("end/" + std::to_string(rank), {});
        for (int other = 0; other < kRanks; ++other)
          store->get("end/" + std::to_string(other), soon());
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        store->set("end/" + std::to_string(rank), {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MeshSecret, OtherSecretIsNamedOnBothSides) {
  for (const std::vector<std::string>& secrets :
       {std::vector{kSecret, kOther, kSecret}, {kOther, kSecret, kSecret}}) {
    const auto errors = join(secrets);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      ASSERT_TRUE(errors[rank]) << "rank " << rank;
      EXPECT_NE(errors[rank]->blame(), Blame::Timeout) << errors[rank]->what();
      EXPECT_THAT(errors[rank]->text(),
                  AllOf(HasSubstr("different"), HasSubstr("ProcessGroupOptions::secret")));
    }
    EXPECT_EQ(errors[0]->blame(), Blame::Caller);
    EXPECT_EQ(errors[1]->blame(), Blame::Caller);
    EXPECT_THAT(errors[0]->text(), HasSubstr("rank 1 cannot join"));
    EXPECT_THAT(errors[0]->ranks(), testing::ElementsAre(1));
  }
}

TEST(MeshSecret, MissingSecretIsNamedOnBothSides) {
  for (const std::vector<std::string>& secrets :
       {std::vector<std::string>{kSecret, "", kSecret}, {"", kSecret, ""}}) {
    const auto errors = join(secrets);
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_NE(error->blame(), Blame::Timeout) << error->what();
      EXPECT_THAT(error->text(), AllOf(HasSubstr("secret"), HasSubstr("give all ranks the same")));
    }
    EXPECT_EQ(errors[0]->blame(), Blame::Caller);
    EXPECT_EQ(errors[1]->blame(), Blame::Caller);
    const std::size_t without = secrets[0].empty() ? 0 : 1;
    EXPECT_THAT(errors[without]->text(),
                HasSubstr("was given a secret, and rank " + std::to_string(without) + " none"));
    EXPECT_THAT(errors[1 - without]->text(), HasSubstr("was given no secret"));
  }
}

TEST(MeshSecret, ForgedAddressIsRefusedByName) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  store->set("mesh/address/1", encode_address("somewhere else"));
  try {
    join_inproc(guarded(0, 2, store, kSecret));
    ADD_FAILURE() << "a forged address was used";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("rank 1"), HasSubstr("'mesh/address/1'"),
                                    HasSubstr("a process outside the group has written it")));
  }
}

TEST(MeshSecret, ForgedTableIsRefusedByName) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  store->set("mesh/table", encode(Table{{}, "tcp", {"one", "another"}}));
  try {
    join_inproc(guarded(1, 2, store, kSecret));
    ADD_FAILURE() << "a forged table was used";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("'mesh/table'"));
  }
}

// A connection that a test writes and reads.
class Talk {
 public:
  explicit Talk(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {
    connection_->receive({[this](const Arrival& arrival) {
                            {
                              std::lock_guard lock(mutex_);
                              heard_.emplace_back(arrival.header.begin(), arrival.header.end());
                            }
                            connection_->accept({}, Pin(), Fence());
                            changed_.notify_all();
                          },
                          [this](const Error& why) {
                            std::lock_guard lock(mutex_);
                            why_ = why;
                            changed_.notify_all();
                          }});
  }
  ~Talk() {
    connection_->close(Error(Blame::Cancelled, "the test ends"));
    why_closed();
  }
  Talk(const Talk&) = delete;
  Talk& operator=(const Talk&) = delete;

  void say(std::span<const std::byte> header) { connection_->send(header, {}, Pin(), Fence()); }
  void say_with_payload(std::span<const std::byte> header) {
    const auto payload = std::make_shared<Message>(1000);
    const Slice slice{payload->data(), payload->size(), Device::host()};
    connection_->send(header, {&slice, 1}, payload, Fence());
  }
  // Returns the next message; nothing if the connection ends without one.
  std::optional<Message> hear() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(lock, soon().point(), [&] { return why_ || !heard_.empty(); }));
    if (heard_.empty()) return std::nullopt;
    Message message = std::move(heard_.front());
    heard_.pop_front();
    return message;
  }
  // Returns why the other end has closed the connection.
  std::string why_closed() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(lock, soon().point(), [&] { return why_.has_value(); }));
    return why_ ? why_->text() : "";
  }

 private:
  const std::shared_ptr<Connection> connection_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> heard_;
  std::optional<Error> why_;
};

// Rank 0 of two has a secret and joins; the test is rank 1, and strangers.
class MeshStrangers : public testing::Test {
 protected:
  MeshStrangers() {
    rank_ = std::thread([this] {
      JoinOptions options = options_of(0, 2, store_);
      options.secret = kSecret;
      try {
        communicator_ = join_inproc(options);
      } catch (const Error& error) {
        join_error_ = error;
      }
    });
    peer_.meet();
    options_ = options_of(1, 2, store_);
    options_.secret = kSecret;
    table_.token = peer_.hello.token;
  }
  ~MeshStrangers() override {
    if (rank_.joinable()) rank_.join();
  }

  Challenge challenge(const std::string& secret = kSecret, int listener = 0) {
    options_.secret = secret;
    return *challenge_of(options_, table_.token, Side::Connector, listener);
  }
  Message hello(Traffic traffic) {
    Hello hello = peer_.hello;
    hello.traffic = traffic;
    const auto bytes = encode(hello);
    return {bytes.begin(), bytes.end()};
  }
  // Rank 0's answer to the opening of a challenge.
  static Message answer_to(Talk& talk, const Message& opening) {
    talk.say(encode_challenge(opening));
    const Message answer = talk.hear().value_or(Message());
    const auto body = decode_challenge(answer);
    EXPECT_TRUE(body.ok()) << "no answer: " << talk.why_closed();
    return body ? Message(body.value().begin(), body.value().end()) : Message();
  }
  static void prove(Talk& talk, Challenge& challenge) {
    const auto proof = challenge.answer(answer_to(talk, challenge.open()));
    ASSERT_TRUE(proof.ok()) << proof.error().text();
    talk.say(encode_challenge(proof.value()));
  }
  // Joins as rank 1, so nothing that strangers have done keeps rank 0 from its group.
  void join_as_rank_1() {
    Talk talk(peer_.connect());
    Challenge own = challenge();
    prove(talk, own);
    talk.say(hello(Traffic::Collectives));
    const auto greeted = decode_hello(talk.hear().value_or(Message()));
    EXPECT_TRUE(greeted.ok());
    Header barrier;
    barrier.call.kind = Kind::Barrier;
    talk.say(encode(barrier));
    rank_.join();
    EXPECT_FALSE(join_error_) << join_error_->what();
    EXPECT_NE(communicator_, nullptr);
    communicator_.reset();
  }
  void expect_turned_away(Talk& talk, const std::string& why) {
    EXPECT_EQ(talk.hear(), std::nullopt) << "rank 0 has answered";
    EXPECT_THAT(talk.why_closed(), HasSubstr(why));
    std::lock_guard lock(mutex_);
    EXPECT_THAT(log_, AllOf(HasSubstr("turned away"), HasSubstr(why)));
    log_.clear();
  }

  std::mutex mutex_;
  std::string log_;
  int warnings_ = 0;
  const log::Capture capture_{[this](LogLevel level, std::string_view text) {
    std::lock_guard lock(mutex_);
    log_ += text;
    warnings_ += level == LogLevel::Warn;
  }};
  std::shared_ptr<harness::MemoryBootstrap> store_ = std::make_shared<harness::MemoryBootstrap>();
  ScriptedPeer peer_{store_};
  JoinOptions options_;
  Table table_;
  std::shared_ptr<Communicator> communicator_;
  std::optional<Error> join_error_;
  std::thread rank_;
};

constexpr const char* kUnproven = "it did not prove that it knows the secret of this group";
constexpr const char* kUnknown = "it does not know the secret of this group";

TEST_F(MeshStrangers, NothingIsReadBeforeTheProof) {
  {
    Talk talk(peer_.connect());  // with the group's token, which the store shows
    talk.say(hello(Traffic::Collectives));
    expect_turned_away(talk, kUnproven);
  }
  {
    Talk talk(peer_.connect());
    talk.say_with_payload(encode_challenge(challenge().open()));
    expect_turned_away(talk, kUnproven);
  }
  {
    Talk talk(peer_.connect());
    answer_to(talk, challenge().open());
    talk.say(hello(Traffic::Collectives));
    expect_turned_away(talk, kUnproven);
  }
  join_as_rank_1();
}

TEST_F(MeshStrangers, WrongMessagesAreTurnedAway) {
  for (const std::size_t bytes : {0, 1, 31, 33, 64}) {
    Talk talk(peer_.connect());
    talk.say(encode_challenge(Message(bytes)));
    expect_turned_away(talk, kUnproven);
  }
  for (const std::size_t at : {0, 4, 6}) {  // magic, version, reserved
    Message message = encode_challenge(challenge().open());
    message[at] ^= std::byte{1};
    Talk talk(peer_.connect());
    talk.say(message);
    expect_turned_away(talk, kUnproven);
  }
  join_as_rank_1();
}

TEST_F(MeshStrangers, WrongProofsAreTurnedAway) {
  {
    Talk talk(peer_.connect());
    Message answer = answer_to(talk, challenge().open());
    ASSERT_EQ(answer.size(), sizeof(Nonce) + sizeof(Proof));
    answer.erase(answer.begin(), answer.begin() + sizeof(Nonce));
    talk.say(encode_challenge(answer));  // its own proof
    expect_turned_away(talk, kUnknown);
  }
  {
    Talk talk(peer_.connect());
    answer_to(talk, challenge(kOther).open());
    talk.say(encode_challenge(Message(sizeof(Proof))));
    expect_turned_away(talk, kUnknown);
  }
  join_as_rank_1();
}

// A rank that looks for another rank, another group or another number of ranks does not take rank
// 0's proof for that rank's.
TEST_F(MeshStrangers, ProofIsOfOneRankOfOneGroup) {
  const auto is_taken = [&](const Table& table, int size, int listener) {
    Talk talk(peer_.connect());
    JoinOptions options = options_;
    options.size = size;
    Challenge own = *challenge_of(options, table.token, Side::Connector, listener);
    return own.answer(answer_to(talk, own.open())).ok();
  };
  Table other = table_;
  other.token[0] ^= std::byte{1};
  EXPECT_TRUE(is_taken(table_, 2, 0));
  EXPECT_FALSE(is_taken(other, 2, 0));
  EXPECT_FALSE(is_taken(table_, 3, 0));
  EXPECT_FALSE(is_taken(table_, 2, 1));
  join_as_rank_1();
}

TEST_F(MeshStrangers, ReplayedProofIsTurnedAway) {
  Challenge own = challenge();
  const Message opening = own.open();
  Message proof;
  {
    Talk talk(peer_.connect());
    proof = own.answer(answer_to(talk, opening)).value();
  }
  Talk talk(peer_.connect());
  answer_to(talk, opening);
  talk.say(encode_challenge(proof));
  expect_turned_away(talk, kUnknown);
  join_as_rank_1();
}

TEST_F(MeshStrangers, SilentOnesAreBounded) {
  std::vector<std::unique_ptr<Talk>> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(std::make_unique<Talk>(peer_.connect()));
    if (i % 2 == 0) strangers.back()->say(encode_challenge(challenge().open()));
  }
  static_cast<void>(strangers[0]->hear());  // its challenge's answer
  // On a machine that is busy for 10 s the time limit is first.
  EXPECT_THAT(strangers[0]->why_closed(), AnyOf(HasSubstr("too many connections without a hello"),
                                                HasSubstr("it sent no hello within")));
  join_as_rank_1();
  std::lock_guard lock(mutex_);
  EXPECT_LE(warnings_, 16) << "strangers could fill a disk with the log";
  EXPECT_THAT(log_, HasSubstr("(further ones: WEFT_LOG=debug)"));
}

// The address of rank 1 belongs to a program that answers, but does not know the secret.
TEST(MeshSecret, ListenerWithoutItIsNamedAtOnce) {
  const log::Capture capture([](LogLevel, std::string_view) {});
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const auto transport = inproc::open().value();
  const auto loop = std::make_shared<EventLoop>("impostor");
  std::vector<std::shared_ptr<Connection>> accepted;
  const auto listener = transport->connector()->listen(
      {.loop = loop, .interface_address = {}, .accepted = [&](auto connection) {
         accepted.push_back(connection);
         Connection* const to = connection.get();
         connection->receive({[to](const Arrival&) {
                                to->send(encode_challenge(Message(64)), {}, Pin(), Fence());
                                to->accept({}, Pin(), Fence());
                              },
                              [](const Error&) {}});
       }});
  store->set("mesh/address/1", encode_address(listener->address()));
  JoinOptions options = options_of(0, 2, store);
  options.secret = kSecret;
  try {
    join_inproc(options);
    ADD_FAILURE() << "rank 0 has taken an impostor for rank 1";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), AllOf(HasSubstr("rank 1"), HasSubstr("another program answers"),
                                    HasSubstr(kUnknown)));
  }
}

}  // namespace
}  // namespace weft::transport::mesh
