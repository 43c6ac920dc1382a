// weft-debug: reads what the ranks' flight recorders held when something went wrong, and says who and what it was.
#include <cstdio>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/profiling/tools/analysis.h>

namespace weft::tools {
namespace {

constexpr int kFound = 1;  // exit codes
constexpr int kUnreadable = 2;

int show(const std::vector<std::string>& files, bool as_json) {
  const Dumps dumps = read_dumps(files);
  const auto findings = analyze(dumps);
  if (as_json) {
    nlohmann::ordered_json rows = nlohmann::json::array();
    for (const Finding& finding : findings)
      rows.push_back({{"what", name(finding.what)}, {"ranks", finding.ranks}, {"text", finding.text}});
    std::printf("%s\n", nlohmann::ordered_json{{"findings", rows}}.dump(2).c_str());
    return findings.empty() ? 0 : kFound;
  }
  std::printf("%zu processes, %zu groups, %zu agents\n", dumps.dumps.size(), dumps.groups.size(), dumps.agents.size());
  for (const Finding& finding : findings) std::printf("%s: %s\n", name(finding.what), finding.text.c_str());
  if (findings.empty()) std::printf("nothing is stuck, nothing has failed, and nobody is behind the others\n");
  return findings.empty() ? 0 : kFound;
}

}  // namespace
}  // namespace weft::tools

int main(int argc, char** argv) {
  CLI::App app("Says what went wrong in a job, from the dumps of its ranks.", "weft-debug");
  app.require_subcommand(1);
  std::vector<std::string> files;
  bool as_json = false;
  CLI::App* analyze = app.add_subcommand(
      "analyze", "Names late and missing ranks, collectives that do not match, calls without a reply, waits in a circle");
  analyze->add_option("dumps", files, "The files that the ranks wrote into WEFT_DUMP_DIR, of one moment")->required();
  analyze->add_flag("--json", as_json, "print a JSON object");
  app.footer("Exit code: 0 nothing found, 1 something found, 2 the dumps cannot be read");
  CLI11_PARSE(app, argc, argv);
  try {
    return weft::tools::show(files, as_json);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft-debug: %s\n", error.what());
    return weft::tools::kUnreadable;
  }
}
