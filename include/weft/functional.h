// Collectives that autograd sees: weft::functional::all_reduce and its like.
#pragma once

#include <weft/engine/group/functional.h>
#include <weft/group.h>
