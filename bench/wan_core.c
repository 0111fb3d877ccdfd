/* The packet core of wan.py: what lies between the nodes. Compiled at run time, loaded as a library.
 *
 * Every node is a TUN device. A packet leaves through its node's uplink (a clock that says when all
 * that was accepted will have left, and a queue of bounded time), travels for the delays of both
 * nodes, passes the other node's downlink in the same way, and is written to the other device.
 *
 * The kernel hands over up to 64 KiB at once, to be cut into segments later (TSO). Rates and queues
 * count the segments with the headers that they will have. Where some segments of a packet do not
 * survive, the packet is cut around them, so that TCP sees the loss of single segments.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NODES = 64, VNET = 10, IP = 20, MAX_SEGMENTS = 128, MAX_READS = 32 };
enum { GSO_TYPE = 1, GSO_SIZE = 4 };         /* offsets in the virtio header */
enum { TCP_CWR = 0x80, TCP_PSH = 8, TCP_FIN = 1 };
enum { UP, DOWN, DELAY, LOSS, DEAD };        /* what `wan_set` sets */

typedef struct {
    int fd;
    uint32_t address;
    double value[5];                         /* bytes/s, bytes/s, s, probability, flag */
    int64_t up_free, down_free;              /* when everything accepted so far will have left */
} Node;

typedef struct {
    int64_t due;
    uint64_t number;                         /* keeps the order of what is due at one time */
    int target, is_delivered, length;
    unsigned char *data;
} Packet;

typedef struct { double packets, bytes, dropped, lost, late_max_s, late_sum_s; } Stats;

static Node nodes[MAX_NODES];
static int num_nodes;
static Packet *heap;
static int heap_size, heap_room;
static uint64_t num_packets, random_state = 88172645463325252ULL;
static Stats stats;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static double uniform(void) {                /* xorshift64 */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) * (1.0 / 9007199254740992.0);
}

static int precedes(const Packet *a, const Packet *b) {
    return a->due < b->due || (a->due == b->due && a->number < b->number);
}

static void push(Packet packet) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
    }
    int i = heap_size++;
    for (int up; i > 0 && precedes(&packet, &heap[up = (i - 1) / 2]); i = up) heap[i] = heap[up];
    heap[i] = packet;
}

static Packet pop(void) {
    Packet first = heap[0], last = heap[--heap_size];
    int i = 0;
    for (int child; (child = 2 * i + 1) < heap_size; i = child) {
        if (child + 1 < heap_size && precedes(&heap[child + 1], &heap[child])) child++;
        if (!precedes(&heap[child], &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}

/* --- packets of several segments --------------------------------------------------------------- */

static int get16(const unsigned char *at) { return at[0] << 8 | at[1]; }
static void put16(unsigned char *at, int value) { at[0] = value >> 8; at[1] = value; }

static uint32_t sum16(const unsigned char *at, int length, uint32_t sum) {
    for (int i = 0; i + 1 < length; i += 2) sum += get16(at + i);
    return sum;
}

static int folded(uint32_t sum) {
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return sum;
}

static int gso_size(const unsigned char *data) {
    uint16_t size;
    memcpy(&size, data + GSO_SIZE, 2);
    return data[GSO_TYPE] ? size : 0;
}

static int header_bytes(const unsigned char *data) {     /* of IP and TCP */
    int ip = (data[VNET] & 15) * 4;
    return ip + (data[VNET + ip + 12] >> 4) * 4;
}

int wan_num_segments(const unsigned char *data, int length) {
    int size = gso_size(data);
    return size ? (length - VNET - header_bytes(data) + size - 1) / size : 1;
}

/* Write segments [start, stop) of a packet to `out` as a packet of their own; return its length. */
int wan_cut(const unsigned char *data, int length, int start, int stop, unsigned char *out) {
    int size = gso_size(data), head = header_bytes(data), ip = (data[VNET] & 15) * 4;
    int payload = length - VNET - head, from = start * size;
    int to = stop * size < payload ? stop * size : payload;
    memcpy(out, data, VNET + head);
    memcpy(out + VNET + head, data + VNET + head + from, to - from);
    if (to - from <= size) {
        uint16_t none = 0;
        out[GSO_TYPE] = 0;
        memcpy(out + GSO_SIZE, &none, 2);
    }
    unsigned char *at = out + VNET, *tcp = at + ip;
    put16(at + 2, head + to - from);
    put16(at + 4, get16(at + 4) + start);
    put16(at + 10, 0);
    put16(at + 10, ~folded(sum16(at, ip, 0)));
    uint32_t sequence;
    memcpy(&sequence, tcp + 4, 4);
    sequence = htonl(ntohl(sequence) + from);
    memcpy(tcp + 4, &sequence, 4);
    if (to < payload) tcp[13] &= ~(TCP_FIN | TCP_PSH);
    if (start) tcp[13] &= ~TCP_CWR;
    /* The checksum is left to the receiving kernel; it wants the sum over the pseudo header here. */
    put16(tcp + 16, folded(sum16(at + 12, 8, 6 + head - ip + to - from)));
    return VNET + head + to - from;
}

static Packet part(const Packet *whole, int start, int stop, int count) {
    Packet copy = *whole;
    copy.number = num_packets++;
    copy.data = malloc(whole->length);
    if (stop - start == count) memcpy(copy.data, whole->data, whole->length);
    else copy.length = wan_cut(whole->data, whole->length, start, stop, copy.data);
    return copy;
}

/* --- links ------------------------------------------------------------------------------------- */

/* Pass a packet over a link; what survives is due when its last segment has left, plus the delay. */
static void transmit(const Packet *packet, double bytes_per_s, double loss, int64_t at,
                     int64_t *free_at, int64_t queue_ns, int64_t delay_ns) {
    int count = wan_num_segments(packet->data, packet->length);
    int head = count > 1 ? header_bytes(packet->data) : 0;
    double wire = packet->length - VNET + (count - 1.0) * head;
    double segment_ns = bytes_per_s > 0 ? wire / count / bytes_per_s * 1e9 : 0;
    int64_t starts = *free_at > at ? *free_at : at;
    int start = 0, index = 0;
    for (; index < count; index++) {
        if (starts - at + index * segment_ns > queue_ns) break;
        if (loss > 0 && uniform() < loss) {
            stats.lost++;
            if (index > start) {
                Packet run = part(packet, start, index, count);
                run.due = starts + (int64_t)(index * segment_ns) + delay_ns;
                push(run);
            }
            start = index + 1;
        }
    }
    stats.dropped += count - index;
    if (index > start) {
        Packet run = part(packet, start, index, count);
        run.due = starts + (int64_t)(index * segment_ns) + delay_ns;
        push(run);
    }
    if (index) *free_at = starts + (int64_t)(index * segment_ns);
}

static void take(Node *node, int64_t queue_ns) {
    static unsigned char buffer[VNET + 65536];
    for (int i = 0; i < MAX_READS; i++) {
        int length = read(node->fd, buffer, sizeof buffer), target = 0;
        if (length < VNET + IP) return;
        if (buffer[VNET] >> 4 != 4) continue;            /* IPv6 looks for routers, for example */
        while (target < num_nodes && memcmp(&nodes[target].address, buffer + VNET + 16, 4)) target++;
        if (target == num_nodes) continue;
        Node *other = &nodes[target];
        if (node->value[DEAD] || other->value[DEAD]) continue;
        Packet packet = {.target = target, .length = length, .data = buffer};
        double delay_s = node->value[DELAY] + other->value[DELAY];
        double loss = node->value[LOSS] + other->value[LOSS];
        transmit(&packet, node->value[UP], loss, now_ns(), &node->up_free, queue_ns, delay_s * 1e9);
    }
}

static void deliver_due(int64_t queue_ns) {
    int64_t now = now_ns();
    while (heap_size && heap[0].due <= now) {
        Packet packet = pop();
        Node *node = &nodes[packet.target];
        if (packet.is_delivered || node->value[DOWN] <= 0) {
            double late_s = (now - packet.due) * 1e-9;
            stats.late_sum_s += late_s;
            if (late_s > stats.late_max_s) stats.late_max_s = late_s;
            stats.packets++;
            stats.bytes += packet.length - VNET;
            if (!node->value[DEAD] && write(node->fd, packet.data, packet.length) < 0) stats.dropped++;
        } else {
            packet.is_delivered = 1;
            transmit(&packet, node->value[DOWN], 0, packet.due, &node->down_free, queue_ns, 0);
        }
        free(packet.data);
    }
}

/* --- what wan.py calls ------------------------------------------------------------------------- */

void wan_add(int fd, uint32_t address) {
    nodes[num_nodes++] = (Node){.fd = fd, .address = address};
}

void wan_set(int node, int what, double value) { nodes[node].value[what] = value; }

Stats *wan_stats(void) { return &stats; }

void wan_seed(uint64_t seed) { random_state ^= seed * 0x9e3779b97f4a7c15ULL; }

/* Carry packets until `stop_fd` can be read. */
void wan_run(double queue_s, int stop_fd) {
    struct pollfd wanted[MAX_NODES + 1];
    for (int i = 0; i < num_nodes; i++) wanted[i] = (struct pollfd){nodes[i].fd, POLLIN, 0};
    wanted[num_nodes] = (struct pollfd){stop_fd, POLLIN, 0};
    prctl(PR_SET_TIMERSLACK, 1000);
    for (;;) {
        int64_t left = heap_size ? heap[0].due - now_ns() : 1000000000;
        if (left < 0) left = 0;
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        if (ppoll(wanted, num_nodes + 1, &timeout, 0) < 0 && errno != EINTR) return;
        if (wanted[num_nodes].revents) return;
        for (int i = 0; i < num_nodes; i++)
            if (wanted[i].revents & POLLIN) take(&nodes[i], queue_s * 1e9);
        deliver_due(queue_s * 1e9);
    }
}
