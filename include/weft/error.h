// weft::Error and weft::Blame.
#pragma once

#include <weft/base/error.h>
