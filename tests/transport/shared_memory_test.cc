// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/transport/shared_memory.h>

namespace {

int interruptions = 0;  // calls that a signal is to interrupt

}  // namespace

// Replaces the C library's function: before Linux 6.14 a signal interrupts it, and the test must
// work on every kernel.
extern "C" int posix_fallocate(int descriptor, off_t offset, off_t bytes) {
  if (interruptions > 0) {
    --interruptions;
    return EINTR;
  }
  return ::syscall(SYS_fallocate, descriptor, 0, offset, bytes) == 0 ? 0 : errno;
}

namespace weft::transport {
namespace {

TEST(SharedMemory, IsAllocatedAndKeepsItsSize) {
  constexpr std::size_t kBytes = (1 << 20) + 100;
  const Descriptor memory = make_shared_memory(kBytes, "test");
  EXPECT_TRUE(is_shared_memory(memory, kBytes));
  EXPECT_FALSE(is_shared_memory(memory, kBytes - 1));
  struct stat about {};
  ASSERT_EQ(fstat(memory.get(), &about), 0);
  EXPECT_GE(static_cast<std::size_t>(about.st_blocks) * 512, kBytes)
      << "not all allocated: touching it may raise SIGBUS";
  EXPECT_NE(ftruncate(memory.get(), 10), 0);
  EXPECT_NE(ftruncate(memory.get(), 2 * kBytes), 0);
}

TEST(SharedMemory, IsMadeDespiteSignals) {
  constexpr std::size_t kBytes = 1 << 20;
  interruptions = 3;
  const Descriptor memory = make_shared_memory(kBytes, "test");
  EXPECT_EQ(interruptions, 0);
  struct stat about {};
  ASSERT_EQ(fstat(memory.get(), &about), 0);
  EXPECT_GE(static_cast<std::size_t>(about.st_blocks) * 512, kBytes);
}

// With vm.memfd_noexec = 1 the kernel adds this seal to every memfd.
TEST(SharedMemory, IsRecognisedWithTheNoExecSeal) {
  constexpr unsigned kNotExecuted = 0x8;  // MFD_NOEXEC_SEAL
  const Descriptor memory(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNotExecuted));
  if (!memory) GTEST_SKIP() << "this kernel is older than Linux 6.3";
  ASSERT_EQ(ftruncate(memory.get(), 4096), 0);
  EXPECT_FALSE(is_shared_memory(memory, 4096)) << "unsealed memory may be shrunk by its peer";
  ASSERT_EQ(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_TRUE(is_shared_memory(memory, 4096));
}

}  // namespace
}  // namespace weft::transport
