#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/tests/engine/rpc/workers.h>

namespace weft::harness {

void run_alone(const Setting& setting, const std::function<void(rpc::Options)>& body, const rpc::Options& given) {
  rpc::Options options = given;
  options.transports = {setting.transport};
  options.world_size = setting.workers;
  if (setting.as == As::Threads) {
    options.store = c10::make_intrusive<c10d::HashStore>();
    run_threads(setting.workers, [&](int rank) {
      rpc::Options own = options;
      own.rank = rank;
      body(own);
    });
    return;
  }
  Processes processes(setting.workers, [&](int rank) {
    rpc::Options own = options;
    own.rank = rank;
    body(own);
  });
  processes.expect_success();
}

void run_workers(const Setting& setting, const std::function<void(rpc::Agent&)>& body, const rpc::Options& options) {
  run_alone(
      setting,
      [&](const rpc::Options& own) {
        rpc::Agent agent = rpc::init("worker" + std::to_string(*own.rank), own);
        body(agent);
        agent.shutdown({.timeout = std::chrono::seconds(30)});
      },
      options);
}

}  // namespace weft::harness
