// SPDX-License-Identifier: Apache-2.0
// Under MPI_THREAD_SERIALIZED no two threads are inside MPI at once, whichever function they call.
// The MPI here is the test's own; it checks that.
#include <array>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/transport/mpi/mpi_communicator.h>

namespace weft::transport::mpi {
namespace {

using testing::HasSubstr;

// Marks a thread as inside MPI. With `stays`, it remains there until another thread is inside too,
// or for 50 ms.
class Inside {
 public:
  explicit Inside(bool stays = false) {
    std::unique_lock lock(mutex);
    if (++threads > 1) together = true;
    changed.notify_all();
    if (stays && longs_for_company)
      changed.wait_for(lock, std::chrono::milliseconds(50), [] { return together; });
  }
  ~Inside() {
    std::lock_guard lock(mutex);
    --threads;
  }
  static void begin() {
    std::lock_guard lock(mutex);
    together = false;
    longs_for_company = true;
  }
  static bool were_together() {
    std::lock_guard lock(mutex);
    return together;
  }

 private:
  static inline std::mutex mutex;
  static inline std::condition_variable changed;
  static inline int threads = 0;
  static inline bool together = false;
  static inline bool longs_for_company = false;
};

// Every call succeeds, and no request ever ends.
std::shared_ptr<Library> serialized_library() {
  auto library = std::make_shared<Library>();
  library->get_library_version = [](char* text, int* bytes) {
    text[0] = '\0';
    *bytes = 0;
    return MPI_SUCCESS;
  };
  library->initialized = [](int* flag) { return *flag = 1, MPI_SUCCESS; };
  library->finalized = [](int* flag) { return *flag = 0, MPI_SUCCESS; };
  library->query_thread = [](int* level) { return *level = MPI_THREAD_SERIALIZED, MPI_SUCCESS; };
  library->comm_set_errhandler = [](MPI_Comm, MPI_Errhandler) { return MPI_SUCCESS; };
  library->comm_rank = [](MPI_Comm, int* rank) { return *rank = 0, MPI_SUCCESS; };
  library->comm_size = [](MPI_Comm, int* ranks) { return *ranks = 1, MPI_SUCCESS; };
  library->comm_get_attr = [](MPI_Comm, int, void*, int* is_set) {
    return *is_set = 0, MPI_SUCCESS;
  };
  library->comm_group = [](MPI_Comm, MPI_Group*) { return Inside(), MPI_SUCCESS; };
  library->group_incl = [](MPI_Group, int, const int*, MPI_Group*) {
    return Inside(), MPI_SUCCESS;
  };
  library->group_free = [](MPI_Group*) { return Inside(), MPI_SUCCESS; };
  library->comm_create_group = [](MPI_Comm, MPI_Group, int, MPI_Comm*) {
    return Inside(), MPI_SUCCESS;
  };
  library->comm_free = [](MPI_Comm*) { return Inside(), MPI_SUCCESS; };
  library->type_contiguous = [](int, MPI_Datatype, MPI_Datatype*) {
    return Inside(/*stays=*/true), MPI_SUCCESS;
  };
  library->type_commit = [](MPI_Datatype*) { return Inside(/*stays=*/true), MPI_SUCCESS; };
  library->op_create = [](MPI_User_function*, int, MPI_Op*) {
    return Inside(/*stays=*/true), MPI_SUCCESS;
  };
  library->error_class = [](int, int* kind) {
    return Inside(/*stays=*/true), *kind = MPI_ERR_OTHER, MPI_SUCCESS;
  };
  library->error_string = [](int, char* text, int* bytes) {
    const Inside inside(/*stays=*/true);
    *bytes = static_cast<int>(std::string("of a test").copy(text, MPI_MAX_ERROR_STRING));
    return MPI_SUCCESS;
  };
  library->testsome = [](int, MPI_Request*, int* ended, int*, MPI_Status*) {
    return Inside(), *ended = 0, MPI_SUCCESS;
  };
  library->ibarrier = [](MPI_Comm, MPI_Request*) { return Inside(), MPI_SUCCESS; };
  library->ibcast = [](void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*) {
    return Inside(), MPI_SUCCESS;
  };
  library->iallreduce = [](const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*) {
    return Inside(), MPI_SUCCESS;
  };
  library->iallgather = [](const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm,
                           MPI_Request*) { return Inside(), MPI_SUCCESS; };
  library->igather = [](const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm,
                        MPI_Request*) { return Inside(), MPI_SUCCESS; };
  library->iscatter = [](const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm,
                         MPI_Request*) { return Inside(), MPI_SUCCESS; };
  library->ialltoallv = [](const void*, const int*, const int*, MPI_Datatype, void*, const int*,
                           const int*, MPI_Datatype, MPI_Comm,
                           MPI_Request*) { return Inside(), MPI_SUCCESS; };
  library->isend = [](const void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*) {
    return Inside(), MPI_SUCCESS;
  };
  library->irecv = [](void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*) {
    return Inside(), MPI_SUCCESS;
  };
  return library;
}

// A world of that MPI with no types made yet, and a communicator whose loop polls MPI all the time
// because its barrier never ends.
class MpiTurn : public testing::Test {
 protected:
  explicit MpiTurn(const std::shared_ptr<const Library>& library = serialized_library())
      : world(new World({}, library)) {
    busy = join("busy");
    static_cast<void>(busy->barrier({}));
    Inside::begin();
  }

  std::unique_ptr<MpiCommunicator> join(const std::string& name) {
    JoinOptions options;
    options.group_name = name;
    options.store = std::make_shared<harness::MemoryBootstrap>();
    options.timeout = std::chrono::minutes(5);
    options.loop = loop;
    return std::make_unique<MpiCommunicator>(options, world);
  }

  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("mpi");
  std::shared_ptr<World> world;
  std::unique_ptr<MpiCommunicator> busy;
  std::array<std::byte, 16> one{};
  std::array<std::byte, 16> other{};
  Elements data{{one.data(), one.size(), Device::host()}, Dtype::Int64};
  Slice part{other.data(), other.size(), Device::host()};
};

// Each test has a world of its own, in which the type is made anew.
TEST_F(MpiTurn, IsHeldWhileMakingBroadcastType) {
  static_cast<void>(busy->broadcast(data, 0, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}
TEST_F(MpiTurn, IsHeldWhileMakingAllGatherType) {
  static_cast<void>(busy->all_gather({&part, 1}, data, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}
TEST_F(MpiTurn, IsHeldWhileMakingGatherType) {
  static_cast<void>(busy->gather({&part, 1}, data, 0, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}
TEST_F(MpiTurn, IsHeldWhileMakingScatterType) {
  static_cast<void>(busy->scatter(data, {&part, 1}, 0, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}
TEST_F(MpiTurn, IsHeldWhileMakingAllToAllType) {
  static_cast<void>(busy->all_to_all({&part, 1}, {&data.slice, 1}, data.dtype, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}
TEST_F(MpiTurn, IsHeldWhileMakingTypeAndOperator) {
  static_cast<void>(busy->all_reduce(data, ReduceOp::Sum, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}
TEST_F(MpiTurn, IsHeldWhileMakingMessageType) {
  static_cast<void>(busy->send(data, 0, 1, {}, {}));
  static_cast<void>(busy->recv({part, Dtype::Int32}, 0, 1, {}, {}));
  EXPECT_FALSE(Inside::were_together());
}

std::shared_ptr<Library> library_that_refuses_messages() {
  auto library = serialized_library();
  library->isend = [](const void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*) {
    return Inside(), MPI_ERR_OTHER;
  };
  return library;
}

class MpiRefusal : public MpiTurn {
 protected:
  MpiRefusal() : MpiTurn(library_that_refuses_messages()) {}
};

// The refused group polls nothing meanwhile, but another group may.
TEST_F(MpiRefusal, ErrorTextIsReadInItsTurn) {
  const auto refused = join("refused");
  const Op op = refused->send(data, 0, 1, {}, {});
  ASSERT_TRUE(op.error());
  EXPECT_THAT(op.error()->text(), HasSubstr("of a test"));
  EXPECT_FALSE(Inside::were_together());
}

}  // namespace
}  // namespace weft::transport::mpi
