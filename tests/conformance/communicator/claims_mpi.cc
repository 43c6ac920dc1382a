// SPDX-License-Identifier: Apache-2.0
// The claims for MPI, whose ranks are processes under mpirun: each process runs this program, and
// so each of its tests, together with the others (mpi_test.cc starts them).
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include <weft/tests/conformance/communicator/host_ranks.h>
#include <weft/tests/conformance/communicator/threads.h>
#include <weft/tests/harness/file_bootstrap.h>
#include <weft/tests/harness/sanitized.h>
#include <weft/transport/mpi/library.h>
#include <weft/transport/registry.h>

namespace weft::conformance {
namespace {

int number_of(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? -1 : std::atoi(text);
}

// Initializes MPI as a program that uses MPI itself would, at the thread level of
// WEFT_TEST_MPI_LEVEL. Weft then does not finalize MPI.
class StartedByTheProgram final : public testing::Environment {
 public:
  void SetUp() override {
    const int wanted = number_of("WEFT_TEST_MPI_LEVEL");
    if (wanted < 0) return;
    library_ = transport::mpi::Library::open().value();
    int level = -1;
    ASSERT_EQ(library_->init_thread(nullptr, nullptr, wanted, &level), MPI_SUCCESS);
    ASSERT_EQ(level, wanted) << "Open MPI gives another level than it was asked for";
  }
  void TearDown() override {
    if (!library_) return;
    EXPECT_EQ(library_->finalize(), MPI_SUCCESS);
  }

 private:
  std::shared_ptr<const transport::mpi::Library> library_;
};
[[maybe_unused]] const auto* const started_by_the_program =
    testing::AddGlobalTestEnvironment(new StartedByTheProgram);

// Returns a store that the ranks share; each call makes a new one. All ranks make the same calls.
std::shared_ptr<transport::Bootstrap> next_store() {
  static int stores = 0;
  const auto folder =
      std::filesystem::path(std::getenv("WEFT_TEST_FOLDER")) / std::to_string(++stores);
  std::filesystem::create_directories(folder);
  return std::make_shared<harness::FileBootstrap>(folder);
}

Rank this_rank(std::shared_ptr<transport::Bootstrap> store) {
  Rank rank;
  rank.rank = number_of("OMPI_COMM_WORLD_RANK");
  rank.size = number_of("OMPI_COMM_WORLD_SIZE");
  rank.store = std::move(store);
  rank.loop = std::make_shared<EventLoop>("rank " + std::to_string(rank.rank));
  equip_host(rank);
  return rank;
}

class MpiRanks final : public Setting {
 public:
  std::string name() const override { return "Mpi"; }
  int ranks() const override { return number_of("OMPI_COMM_WORLD_SIZE"); }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    Rank rank = this_rank(next_store());
    rank.communicator = transport::open("mpi")->join(Threads::options_for(rank, timeout));
    body(rank);
    leave(rank);
  }
};

INSTANTIATE_TEST_SUITE_P(Below, CommunicatorClaims, testing::Values(std::make_shared<MpiRanks>()),
                         name_of);

Op sum(Communicator& communicator, Memory& number, const std::shared_ptr<Memory>& pin) {
  return communicator.all_reduce({number.slice(), Dtype::Int64}, ReduceOp::Sum, pin, Fence());
}

// Two sub-groups run at once while the communicator of all ranks is in use: their messages must not
// be mixed up.
TEST(MpiGroups, SubgroupsWorkInAnyRankOrder) {
  const auto store = next_store(), even = next_store(), odd = next_store();
  Rank rank = this_rank(store);
  rank.communicator =
      transport::open("mpi")->join(Threads::options_for(rank, std::chrono::seconds(60)));
  const auto all_memory = rank.allocate(sizeof(std::int64_t));
  std::int64_t one = 1;
  all_memory->write(&one);
  const Op all = sum(*rank.communicator, *all_memory, all_memory);
  // The ranks of a group, last first.
  Rank part = this_rank(rank.rank % 2 == 0 ? even : odd);
  part.size = (rank.size + 1 - rank.rank % 2) / 2;
  part.rank = part.size - 1 - rank.rank / 2;
  part.communicator =
      transport::open("mpi")->join(Threads::options_for(part, std::chrono::seconds(60)));
  EXPECT_EQ(part.communicator->rank(), part.rank);
  const auto memory = part.allocate(sizeof(std::int64_t));
  std::int64_t own = rank.rank + 1, expected = 0;
  for (int other = rank.rank % 2; other < rank.size; other += 2) expected += other + 1;
  memory->write(&own);
  const Op op = sum(*part.communicator, *memory, memory);
  EXPECT_TRUE(op.done().synchronize(Deadline::in(std::chrono::seconds(60))));
  EXPECT_TRUE(all.done().synchronize(Deadline::in(std::chrono::seconds(60))));
  memory->read(&own);
  all_memory->read(&one);
  EXPECT_EQ(own, expected);
  EXPECT_EQ(one, rank.size);
  leave(part);
  leave(rank);
}

TEST(MpiGroups, RefuseOneProcessAsTwoRanks) {
  const auto store = next_store(), own = next_store();
  Rank rank = this_rank(own);
  // As if this process were both ranks of a group; rank 1 joins first.
  if (rank.rank == 0) {
    const auto options = [&](int number) {
      Rank of = this_rank(own);
      of.rank = number;
      of.size = 2;
      return Threads::options_for(of, std::chrono::milliseconds(100));
    };
    const auto join = [&](int number) {
      try {
        transport::open("mpi")->join(options(number));
      } catch (const Error& error) {
        return error;
      }
      return Error(Blame::Cancelled, "nothing was thrown");
    };
    EXPECT_EQ(join(1).blame(), Blame::Timeout);  // rank 0 has not joined yet
    const Error error = join(0);
    EXPECT_EQ(error.blame(), Blame::Unsupported) << error.what();
    EXPECT_NE(error.text().find("rank 1 is the process of another rank"), std::string::npos)
        << error.what();
  }
}

// Run in an mpirun of its own: the killed rank makes mpirun end the job, and with it this test.
TEST(MpiFaults, RankIsKilledMidway) {
  Rank rank = this_rank(next_store());
  rank.communicator =
      transport::open("mpi")->join(Threads::options_for(rank, std::chrono::seconds(60)));
  const auto memory = rank.allocate(sizeof(std::int64_t));
  for (int i = 0; i < 10; ++i) {
    if (rank.rank == rank.size - 1 && i == 5) ::raise(SIGKILL);
    static_cast<void>(sum(*rank.communicator, *memory, memory)
                          .done()
                          .synchronize(Deadline::in(std::chrono::seconds(60))));
  }
  ADD_FAILURE() << "all ten sums ended, and mpirun did not end this rank";
}

TEST(MpiMessages, WrongSizeIsTheReceiversError) {
  Rank rank = this_rank(next_store());
  rank.communicator =
      transport::open("mpi")->join(Threads::options_for(rank, std::chrono::seconds(60)));
  if (rank.rank < 2) {
    const auto memory = rank.allocate(rank.rank == 0 ? 8 : 16);
    auto* const messages = rank.communicator->point_to_point();
    const Elements elements{memory->slice(), Dtype::UInt8};
    const Op op = rank.rank == 0 ? messages->send(elements, 1, 3, memory, {})
                                 : messages->recv(elements, 0, 3, memory, {});
    EXPECT_TRUE(op.done().synchronize(Deadline::in(std::chrono::seconds(60))));
    if (rank.rank == 1) {
      ASSERT_TRUE(op.error());
      EXPECT_EQ(op.error()->blame(), Blame::Caller) << op.error()->what();
      EXPECT_NE(op.error()->text().find("8 bytes came where 16 were expected"), std::string::npos)
          << op.error()->what();
    }
  }
  leave(rank);
}

// Larger than any process may allocate: the parts are not adjacent, so MPI is given one temporary
// buffer.
TEST(MpiMemory, ExhaustionFailsOperationAndGroup) {
  if (harness::kSanitized)
    GTEST_SKIP() << "a sanitizer ends a program that asks for that much memory";
  Rank rank = this_rank(next_store());
  rank.communicator =
      transport::open("mpi")->join(Threads::options_for(rank, std::chrono::seconds(60)));
  const auto memory = rank.allocate(64);
  const Slice whole = memory->slice();
  std::vector<Slice> apart(static_cast<std::size_t>(rank.size),
                           {whole.data, std::size_t{1} << 60, Device::host()});
  const Elements input{{whole.data, 8, Device::host()}, Dtype::UInt8};
  const Op op = rank.communicator->all_gather(apart, input, memory, {});
  for (const Op& failed : {op, rank.communicator->barrier({})}) {
    ASSERT_TRUE(failed.done().synchronize(Deadline::in(std::chrono::seconds(60))));
    ASSERT_TRUE(failed.error());
    EXPECT_EQ(failed.error()->blame(), Blame::Busy) << failed.error()->what();
    EXPECT_NE(failed.error()->text().find("is out of memory"), std::string::npos)
        << failed.error()->what();
  }
}

TEST(MpiJoining, SingleThreadedMpiIsRefusedWithAdvice) {
  if (number_of("WEFT_TEST_MPI_LEVEL") != MPI_THREAD_SINGLE)
    GTEST_SKIP() << "MPI has more threads in this run";
  Rank rank = this_rank(next_store());
  try {
    transport::open("mpi")->join(Threads::options_for(rank, std::chrono::seconds(60)));
    ADD_FAILURE() << "it was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    EXPECT_NE(error.text().find("MPI_Init_thread(MPI_THREAD_MULTIPLE)"), std::string::npos)
        << error.what();
  }
}

TEST(MpiJoining, RefusesDeviceMemoryByName) {
  Rank rank = this_rank(next_store());
  auto options = Threads::options_for(rank, std::chrono::seconds(60));
  options.device = Device::cuda(0);
  const auto mpi = transport::open("mpi");
  EXPECT_FALSE(mpi->reaches(DeviceType::Cuda));
  try {
    mpi->join(options);
    ADD_FAILURE() << "it was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    EXPECT_NE(error.text().find("CUDA"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace weft::conformance
