// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <nlohmann/json.hpp>

#include <weft/profiling/bench/timelines.h>
#include <weft/profiling/bench/workers.h>

namespace weft::bench {

namespace {

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::exit(2);
}

std::string output_of(const std::string& command) {
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) fail("'" + command + "' cannot be run");
  std::string text;
  std::array<char, 65536> buffer{};
  for (std::size_t count = 0; (count = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    text.append(buffer.data(), count);
  if (::pclose(pipe) != 0) fail("'" + command + "' failed");
  return text;
}

}  // namespace

std::string beside(const std::string& program) {
  const auto path = std::filesystem::path(this_program()).parent_path() / program;
  if (!std::filesystem::exists(path))
    fail("there is no '" + path.string() + "': build it (./dev build " + program + ")");
  return path;
}

std::string new_folder() {
  std::string name = std::filesystem::temp_directory_path() / "weft-bench-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) fail("no folder can be made in '" + name + "'");
  return name;
}

double exposed_in(const std::string& timeline) {
  const auto summary = nlohmann::json::parse(
      output_of("'" + beside("weft-timeline") + "' summary --json '" + timeline + "'"));
  double exposed = 0;
  double total = 0;
  const auto& steps = summary.at("steps");
  for (std::size_t i = 0; i + 1 < steps.size(); ++i) {
    if (steps[i].at("ranks").at("0").at("exposed_us").is_null()) {
      fail("'" + timeline +
           "' does not say what was exposed: this is a build with WEFT_TRACE=OFF; build another "
           "preset than "
           "release");
    }
    exposed += steps[i].at("ranks").at("0").at("exposed_us").get<double>();
    total += steps[i].at("ranks").at("0").at("total_us").get<double>();
  }
  return 100 * exposed / total;
}

}  // namespace weft::bench
