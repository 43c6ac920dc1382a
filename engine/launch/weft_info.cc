// SPDX-License-Identifier: Apache-2.0
// weft-info: lists which transports of this build can be used on this machine and what they can do,
// and why the others cannot be used.
#include <cstdio>
#include <string>

#include <nlohmann/json.hpp>
#include <unistd.h>
#if WEFT_INFO_LIBTORCH
#include <torch/headeronly/version.h>
#endif

#include <weft/base/config.h>
#include <weft/base/version.h>
#if WEFT_INFO_CUDA
#include <weft/cuda/driver.h>
#endif
#include <weft/engine/launch/command_line.h>
#include <weft/transport/registry.h>

namespace weft {
namespace {

nlohmann::ordered_json describe_backend(const transport::Backend& backend) {
  nlohmann::ordered_json row{{"name", backend.name}, {"usable", false}};
  const auto opened = backend.open();
  if (!opened) {
    row["why_not"] = opened.error().text();
    return row;
  }
  transport::Transport& transport = *opened.value();
  row["usable"] = true;
  row["host_memory"] = transport.reaches(DeviceType::Host);
  row["device_memory"] = transport.reaches(DeviceType::Cuda);
  transport::Connector* connector = transport.connector();
  row["connections"] = connector != nullptr;
  if (const auto lines = transport.describe(); !lines.empty()) row["found"] = lines;
  if (connector == nullptr) return row;
  const transport::Capabilities can = connector->capabilities();
  row["preference"] = connector->preference();
  row["one_sided"] = can.one_sided;
  row["inline_bytes"] = can.inline_bytes;
  row["max_message"] = can.max_message;
  return row;
}

#if WEFT_INFO_CUDA
// Not a backend: connections of shm use it for device memory (transport/cuda_ipc/cuda_ipc.h).
nlohmann::ordered_json describe_cuda_ipc() {
  nlohmann::ordered_json row{{"name", "cuda_ipc"}, {"usable", false}};
  const auto driver = cuda::Driver::open();
  if (!driver) {
    row["why_not"] = driver.error().text();
    return row;
  }
  int gpus = 0;
  const CUresult counted = driver.value()->device_get_count(&gpus);
  if (counted != CUDA_SUCCESS || gpus == 0) {
    row["why_not"] =
        counted == CUDA_SUCCESS
            ? "this process sees no GPU: there is none, or CUDA_VISIBLE_DEVICES hides it"
            : cuda::error_of(*driver.value(), counted, "cuDeviceGetCount").text();
    return row;
  }
  row["usable"] = true;
  row["host_memory"] = false;
  row["device_memory"] = true;
  row["connections"] = true;
  row["over"] = "shm";
  return row;
}
#endif

void print_row(const nlohmann::ordered_json& row) {
  const auto name = row["name"].get<std::string>();
  if (!row["usable"].get<bool>()) {
    std::printf("%-10s not usable: %s\n", name.c_str(), row["why_not"].get<std::string>().c_str());
    return;
  }
  const bool on_host = row["host_memory"].get<bool>();
  const bool on_device = row["device_memory"].get<bool>();
  std::string text = on_host && on_device ? "host and device memory"
                     : on_device          ? "device memory"
                                          : "host memory";
  if (row.contains("over")) {
    text += " of remote calls over " + row["over"].get<std::string>() +
            ", read in place; chosen for each pair of processes (WEFT_LOG=info shows when)";
  } else if (row["connections"].get<bool>()) {
    text += "; connections: preference " + std::to_string(row["preference"].get<int>()) +
            ", inline up to " + std::to_string(row["inline_bytes"].get<std::size_t>()) + " bytes" +
            (row["one_sided"].get<bool>() ? ", one-sided" : "");
  } else {
    text += "; process groups only (collectives, send and recv), no remote calls";
  }
  std::printf("%-10s usable: %s\n", name.c_str(), text.c_str());
  if (!row.contains("found")) return;
  for (const auto& line : row["found"])
    std::printf("%-10s   %s\n", "", line.get<std::string>().c_str());
}

std::string version_line() {
  std::string line = "weft-info " + version();
#if WEFT_INFO_LIBTORCH
  line += " (libtorch " TORCH_VERSION ")";
#endif
  return line;
}

int show(bool as_json) {
  nlohmann::ordered_json rows = nlohmann::json::array();
  for (const transport::Backend& backend : transport::backends())
    rows.push_back(describe_backend(backend));
#if WEFT_INFO_CUDA
  rows.push_back(describe_cuda_ipc());
#endif
  for (const transport::LeftOut& one : transport::left_out()) {
    const std::string why = "not in this build: " + std::string(one.why);
    rows.push_back({{"name", one.name}, {"usable", false}, {"why_not", why}});
  }
  if (as_json) {
    std::printf("%s\n", nlohmann::ordered_json{{"transports", rows}}.dump(2).c_str());
  } else {
    for (const auto& row : rows) print_row(row);
  }
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  std::perror("weft-info: cannot write to stdout");
  return 1;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  CLI::App app(
      "Lists the transports of this build, and says which of them this machine can use, or why "
      "not.",
      "weft-info");
  app.set_version_flag("--version", weft::version_line());
  bool as_json = false;
  app.add_flag("--json", as_json, "print a JSON object instead of a table");
  weft::launch::parse(app, argc, argv);
  try {
    static_cast<void>(weft::config());  // reports a wrong variable
    return weft::show(as_json);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft-info: %s\n", error.what());
    return 2;
  }
}
