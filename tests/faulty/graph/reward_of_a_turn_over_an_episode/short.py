def short(turn):
    return float(len(turn.reply) < 100)
