// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <weft/tests/cuda/driver_claims.h>

namespace weft::cuda {
namespace {

Result<std::shared_ptr<const Driver>> open_real() { return Driver::open(); }

class RealGraphs final : public Graphs {
 public:
  ~RealGraphs() override {
    if (launchable_ != nullptr)
      call<decltype(&cuGraphExecDestroy)>("cuGraphExecDestroy", launchable_);
  }
  CUresult begin(const StreamRef& stream) override {
    const DeviceGuard guard(stream.device());
    return call<decltype(&cuStreamBeginCapture)>("cuStreamBeginCapture_v2", stream.native(),
                                                 CU_STREAM_CAPTURE_MODE_GLOBAL);
  }
  CUresult end(const StreamRef& stream) override {
    const DeviceGuard guard(stream.device());
    CUgraph graph = nullptr;
    CUresult result =
        call<decltype(&cuStreamEndCapture)>("cuStreamEndCapture", stream.native(), &graph);
    if (result == CUDA_SUCCESS)
      result = call<decltype(&cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags",
                                                            &launchable_, graph, 0ull);
    if (graph != nullptr) call<decltype(&cuGraphDestroy)>("cuGraphDestroy", graph);
    return result;
  }
  CUresult launch(const StreamRef& stream) override {
    const DeviceGuard guard(stream.device());
    return call<decltype(&cuGraphLaunch)>("cuGraphLaunch", launchable_, stream.native());
  }

 private:
  // Calls a function of cuda.h by its name in libcuda, to which the program is not linked.
  template <class Function, class... Arguments>
  static CUresult call(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto function = reinterpret_cast<Function>(dlsym(library, symbol));
    return function == nullptr ? CUDA_ERROR_NOT_FOUND : function(arguments...);
  }

  CUgraphExec launchable_ = nullptr;
};

std::unique_ptr<Graphs> real_graphs() { return std::make_unique<RealGraphs>(); }

INSTANTIATE_TEST_SUITE_P(Gpu, DriverClaims,
                         testing::Values(DriverSource{"libcuda", &open_real, &real_graphs}));

}  // namespace
}  // namespace weft::cuda
