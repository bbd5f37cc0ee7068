/* AMX on processors without it: its instructions, which are none there, arrive as SIGILL and are done in plain C. So the
   compiled library itself is tested, instruction by instruction, a thousand times as slowly.

   Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, TILELOADD and LDTILECFG. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

struct setting {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
};

static __thread struct setting setting;
static __thread uint8_t tile[8][16][64];
static long products;

static int64_t value_of(const ucontext_t *context, int number)
{
    static const int registers[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                    REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[registers[number]];
}

static float bfloat16(const uint8_t *at)
{
    uint32_t x = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    if (!(x & 0x7f800000)) x &= 0x80000000; /* what is too small to be normal is 0 */
    float number;
    memcpy(&number, &x, 4);
    return number;
}

static void multiply(int sum, int left, int right)
{
    for (int m = 0; m < setting.rows[sum]; m++)
        for (int k = 0; k < setting.bytes_of_row[left] / 4; k++)
            for (int n = 0; n < setting.bytes_of_row[sum] / 4; n++) {
                float total;
                memcpy(&total, &tile[sum][m][4 * n], 4);
                for (int i = 0; i < 4; i += 2)
                    total += bfloat16(&tile[left][m][4 * k + i]) * bfloat16(&tile[right][k][4 * n + i]);
                memcpy(&tile[sum][m][4 * n], &total, 4);
            }
    __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
}

/* rows that begin at base + index * scale + displacement, index * scale apart: the index is the distance */
static void move(int number, uint8_t *base, int64_t apart, int is_store)
{
    for (int row = 0; row < setting.rows[number]; row++) {
        uint8_t *at = base + row * apart;
        if (is_store)
            memcpy(at, tile[number][row], setting.bytes_of_row[number]);
        else
            memcpy(tile[number][row], at, setting.bytes_of_row[number]);
    }
}

static void no_tile(void)
{
    static const char text[] = "emulated_tiles.c: an instruction that it does not know\n";
    if (write(2, text, sizeof text - 1)) abort();
}

static void emulate(int signal_number, siginfo_t *info, void *of_context)
{
    (void)signal_number, (void)info;
    ucontext_t *context = of_context;
    uint8_t *at = (uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) no_tile(); /* three bytes of VEX, with the map 0F38 */
    int extended_index = !(at[1] & 0x40), extended_base = !(at[1] & 0x20);
    int third = ~(at[2] >> 3) & 15, prefix = at[2] & 3; /* 0: none, 1: 66, 2: F3, 3: F2 */
    int opcode = at[3], mode = at[4] >> 6, first = at[4] >> 3 & 7, second = at[4] & 7;
    uint8_t *next = at + 5;
    int64_t base = 0, index = 0, scale = 0;
    if (mode != 3) {
        int number = second;
        if (second == 4) {
            int of_index = (*next >> 3 & 7) + 8 * extended_index;
            scale = 1 << (*next >> 6);
            index = of_index == 4 ? 0 : value_of(context, of_index);
            number = *next++ & 7;
        }
        if (number == 5 && mode == 0) no_tile(); /* relative to the next instruction */
        base = value_of(context, number + 8 * extended_base);
        if (mode == 1) base += (int8_t)*next, next += 1;
        if (mode == 2) {
            int32_t displacement;
            memcpy(&displacement, next, 4);
            base += displacement, next += 4;
        }
    }
    if (opcode == 0x49 && mode != 3 && first == 0 && prefix == 0) { /* ldtilecfg */
        memcpy(&setting, (void *)(base + index * scale), sizeof setting);
        memset(tile, 0, sizeof tile);
    } else if (opcode == 0x49 && mode != 3 && first == 0 && prefix == 1) /* sttilecfg */
        memcpy((void *)(base + index * scale), &setting, sizeof setting);
    else if (opcode == 0x49 && mode == 3 && prefix == 3) /* tilezero */
        memset(tile[first], 0, sizeof tile[first]);
    else if (opcode == 0x4b && mode != 3 && (prefix == 2 || prefix == 3)) /* tilestored, tileloadd */
        move(first, (uint8_t *)base, index * scale, prefix == 2);
    else if (opcode == 0x5c && mode == 3 && prefix == 2) /* tdpbf16ps */
        multiply(first, second, third);
    else
        no_tile();
    if (setting.palette != 1 && opcode != 0x49) no_tile(); /* tiles are used before they are set */
    context->uc_mcontext.gregs[REG_RIP] = (int64_t)next;
}

static struct sigaction before;

void begin_emulation(void)
{
    struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, &before);
}

void end_emulation(void) { sigaction(SIGILL, &before, NULL); }

/* how often tiles were multiplied */
long products_so_far(void) { return products; }

/* whether those of this thread are left as they were found, by an instruction that is emulated, too */
int is_left_alone(void)
{
    struct setting now;
    __asm__ volatile("sttilecfg %0" : "=m"(now));
    return now.palette == 0;
}
