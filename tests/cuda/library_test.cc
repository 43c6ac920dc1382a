// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <span>

#include <weft/cuda/fence.h>
#include <weft/cuda/library.h>
#include <weft/cuda/memory.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::array<std::byte, 64> kImage{};  // the fake accepts any image

struct Pair {
  std::int32_t first;
  double second;
};

class Libraries : public FakeCuda {
 protected:
  Libraries() {
    fake.define_kernel<float*, float, std::size_t>(
        "scale", [](float* values, float factor, std::size_t count) {
          for (std::size_t i = 0; i < count; ++i) values[i] *= factor;
        });
    fake.define_kernel<Pair, Pair*>("store_pair", [](Pair pair, Pair* to) { *to = pair; });
    fake.define_kernel("shape", {},
                       [this](const harness::FakeDriver::Launch& launch) { launched = launch; });
    fake.define_kernel("crash", [] { throw std::runtime_error("index out of range"); });
  }

  Library load() { return Library(*device, kImage); }

  harness::FakeDriver::Launch launched;
  Stream stream{*device};
};

TEST_F(Libraries, LaunchCopiesItsArguments) {
  Library library = load();
  library.preload(*device);
  DeviceMemory memory(stream, 4 * sizeof(float));
  auto* values = static_cast<float*>(memory.slice().data);
  fake.run();
  for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(i);
  {
    float factor = 2.5f;
    std::size_t count = 4;
    launch(stream, library.kernel("scale"), {1}, {32}, 0, values, factor, count);
    factor = 0;
    count = 0;
  }
  fake.run();
  EXPECT_THAT(std::span(values, 4), ElementsAre(0.f, 2.5f, 5.f, 7.5f));
}

TEST_F(Libraries, KernelsTakeStructs) {
  Library library = load();
  library.preload(*device);
  Pair stored{};
  launch(stream, library.kernel("store_pair"), {1}, {1}, 0, Pair{7, 0.5}, &stored);
  fake.run();
  EXPECT_EQ(stored.first, 7);
  EXPECT_EQ(stored.second, 0.5);
}

TEST_F(Libraries, LaunchShapeArrivesUnchanged) {
  Library library = load();
  library.preload(*device);
  launch(stream, library.kernel("shape"), {3, 4, 5}, {32, 2, 1}, 1024);
  fake.run();
  EXPECT_EQ(launched.grid.x * 100 + launched.grid.y * 10 + launched.grid.z, 345u);
  EXPECT_EQ(launched.block.x * 100 + launched.block.y * 10 + launched.block.z, 3221u);
  EXPECT_EQ(launched.shared_bytes, 1024u);
}

TEST_F(Libraries, WrongArgumentsAreACallerError) {
  Library library = load();
  library.preload(*device);
  const Kernel scale = library.kernel("scale");
  EXPECT_THAT(scale.parameters(), ElementsAre(sizeof(float*), sizeof(float), sizeof(std::size_t)));
  float* const values = nullptr;
  const Error wrong_size = error_from([&] { launch(stream, scale, {1}, {1}, 0, values, 2.0f, 4); });
  EXPECT_EQ(wrong_size.blame(), Blame::Caller);
  EXPECT_THAT(wrong_size.text(), AllOf(HasSubstr("'scale'"),
                                       HasSubstr("argument 2 has 4 bytes, its parameter has 8")));
  const Error wrong_count = error_from([&] { launch(stream, scale, {1}, {1}, 0, values, 2.0f); });
  EXPECT_THAT(wrong_count.text(), HasSubstr("takes 3 arguments, 2 were given"));
  EXPECT_EQ(fake.calls(&Driver::launch_kernel), 0);
}

TEST_F(Libraries, UnknownKernelIsNamed) {
  Library library = load();
  const Error error = error_from([&] { library.kernel("no_such"); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("'no_such'"));
}

TEST_F(Libraries, RefusedLaunchNamesKernelAndDevice) {
  Library library = load();
  library.preload(*device);
  const Error error = error_from([&] { launch(stream, library.kernel("shape"), {1}, {2048}, 0); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("launching 'shape' on cuda:0: CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(Libraries, EmptyImageIsRefused) {
  EXPECT_EQ(error_from([&] { Library(*device, {}); }).blame(), Blame::Caller);
}

TEST_F(Libraries, ImageForOtherGpusIsUnsupported) {
  fake.fail(&Driver::library_load_data, CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(error_from([&] { load(); }).blame(), Blame::Unsupported);
}

// Without preload() a kernel's first launch waits for the device, whose streams may be waiting for
// this thread.
TEST_F(Libraries, PreloadedKernelsLaunchAtOnce) {
  Library library = load();
  library.preload(*device);
  EXPECT_EQ(fake.calls(&Driver::func_load), 4)
      << "every kernel, not only those that were looked up";
  Stream blocked(*device);
  fake.hold(blocked);
  const Fence held = record(blocked);
  const int blocks = fake.host_blocks();
  launch(stream, library.kernel("shape"), {1}, {1}, 0);
  EXPECT_EQ(fake.host_blocks(), blocks);
  EXPECT_FALSE(held.query());
  fake.release(blocked);
  fake.run();
}

TEST_F(Libraries, FirstLaunchBlocksWithoutPreload) {
  Library library = load();
  const Kernel shape = library.kernel("shape");
  const int blocks = fake.host_blocks();
  launch(stream, shape, {1}, {1}, 0);
  EXPECT_EQ(fake.host_blocks(), blocks + 1);
  launch(stream, shape, {1}, {1}, 0);
  EXPECT_EQ(fake.host_blocks(), blocks + 1);
  fake.run();
}

TEST_F(Libraries, KernelCrashEndsTheContext) {
  Library library = load();
  library.preload(*device);
  launch(stream, library.kernel("crash"), {1}, {1}, 0);
  const Fence after = record(stream);
  fake.run();
  EXPECT_THAT(fake.take_complaints(), ElementsAre(HasSubstr("index out of range")));
  EXPECT_TRUE(after.query());
  EXPECT_EQ(device->lost()->native_code(), CUDA_ERROR_LAUNCH_FAILED);
  take_logged();
}

TEST_F(Libraries, AreMovableAndUnloadedOnce) {
  {
    Library first = load();
    const Kernel shape = first.kernel("shape");
    Library second = std::move(first);
    second.preload(*device);
    launch(stream, shape, {1}, {1}, 0);
    fake.run();
  }
  EXPECT_EQ(fake.calls(&Driver::library_unload), 1);
  EXPECT_EQ(fake.alive().libraries, 0u);
}

TEST_F(Libraries, CanBeRetired) {
  auto library = std::make_shared<Library>(load());
  library->preload(*device);
  launch(stream, library->kernel("shape"), {1}, {1}, 0);
  device->retirement().retire(record(stream),
                              [library = std::move(library)]() mutable { library.reset(); });
  EXPECT_EQ(device->retirement().reclaim(), 0u);
  fake.run();
  EXPECT_EQ(device->retirement().reclaim(), 1u);
  EXPECT_EQ(fake.alive().libraries, 0u);
}

}  // namespace
}  // namespace weft::cuda
